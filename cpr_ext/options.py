"""Checks of what users pass to a ``Checkpointer``: each error names value and remedy."""

from __future__ import annotations

from collections.abc import Sequence

from cpr_ext.errors import UsageError


def require_one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    """Raises UsageError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise UsageError(f"{option} is {value!r}; allowed: {', '.join(allowed)}")


def require_positive_or_none(option: str, value: float | None) -> None:
    """Raises UsageError for a number that is not above zero."""
    if value is not None and not value > 0:
        raise UsageError(f"{option} is {value}; it must be positive, or None")


def require_at_least_one(option: str, value: int | None, otherwise: str = "") -> None:
    """Raises UsageError for a number below one; ``otherwise`` ends the message."""
    if value is not None and value < 1:
        raise UsageError(f"{option} is {value}; it must be at least 1{otherwise}")


def require_kind(option: str, value: object, kind: type, example: str) -> None:
    """Raises UsageError unless ``value`` is None or of the class ``kind``."""
    if value is not None and not isinstance(value, kind):
        raise UsageError(f"{option} is {value!r}; needed: such as {example}")
