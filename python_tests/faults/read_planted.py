"""Mistakes of a reader that every campaign of failing reads must find."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cpr_ext._native import native
from cpr_ext.errors import DamageError, StorageError
from cpr_ext.storage import segment_header


def _taken_for_damage(module: Any, name: str) -> None:
    real = getattr(module, name)

    def believe(*arguments: Any, **options: Any) -> Any:
        try:
            return real(*arguments, **options)
        except StorageError as error:
            raise DamageError(str(error)) from error

    setattr(module, name, believe)


# What it is, who reads with it, and a pattern of the calls that show it.
PLANTED: dict[str, tuple[Callable[[], None], tuple[str, ...], str]] = {
    "headers that cannot be read are damaged": (
        partial(_taken_for_damage, segment_header, "retrying"),
        ("recover",),
        r"openr:segments/\d+-dense",
    ),
    "rows that cannot be read are damaged": (
        partial(_taken_for_damage, native, "restore_segment"),
        ("recover",),
        r"pread:",
    ),
}
