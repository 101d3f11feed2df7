"""Mistakes of a reader that every campaign of failing reads must find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpr_ext
from cpr_ext._native import native
from cpr_ext.errors import DamageError, StorageError
from cpr_ext.storage import retries, segment_header


def _headers_that_fail_are_damaged() -> None:
    read = segment_header.retrying_segment

    def believe(path: Path, action: Callable[[], Any]) -> Any:
        try:
            return read(path, action)
        except StorageError as error:
            raise DamageError(str(error)) from error

    segment_header.retrying_segment = believe


def _rows_that_fail_are_damaged() -> None:
    for name in ("restore_segment", "restore_segments"):
        real = getattr(native, name)

        def believe(*arguments: Any, real: Any = real, **options: Any) -> Any:
            return real(*arguments, **{**options, "unreadable_is_damage": True})

        setattr(native, name, believe)
    retries.UnreadableError = DamageError  # type: ignore[misc]


def _falling_back_forgets() -> None:
    roll_back = cpr_ext.storage.store.Store.roll_back
    cpr_ext.storage.store.Store.roll_back = (  # type: ignore[method-assign]
        lambda self, snapshot, keep=(): roll_back(self, snapshot)
    )


# What it is, who reads with it, and a pattern of the calls that show it.
PLANTED: dict[str, tuple[Callable[[], None], tuple[str, ...], str]] = {
    "headers that cannot be read are damaged": (
        _headers_that_fail_are_damaged,
        ("recover",),
        r"openr:segments/\d+-dense",
    ),
    "rows that cannot be read are damaged": (
        _rows_that_fail_are_damaged,
        ("recover",),
        r"pread:",
    ),
    "falling back forgets what it could not read": (
        _falling_back_forgets,
        ("fall-back",),
        r"openr:segments/\d+-dense",
    ),
}
