"""Attributes under their old names. They work for one version, with a warning."""

from __future__ import annotations

import warnings
from typing import Any


class RenamedTo:
    """An attribute that has another name now: ``old = RenamedTo("new")`` in a class body."""

    def __init__(self, new_name: str) -> None:
        self._new_name = new_name
        self.__doc__ = f"Deprecated; use ``{new_name}``."

    def __set_name__(self, owner: type, name: str) -> None:
        self._old_name = f"{owner.__name__}.{name}"

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warnings.warn(
            f"{self._old_name} will be removed; use {self._new_name}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(instance, self._new_name)
