"""Range checks of the policy's inputs: each error gives the value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cpr_ext.errors import UsageError


def require_positive(values: Mapping[str, float]) -> None:
    """Raise UsageError unless each value is a finite number above 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name} is {value}; it must be above 0")


def require_not_negative(values: Mapping[str, float]) -> None:
    """Raise UsageError unless each value is a finite number, at least 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"{name} is {value}; it must not be negative")


def require_share(name: str, value: float) -> None:
    """Raise UsageError unless ``value`` is above 0 and at most 1."""
    if not 0 < value <= 1:
        raise UsageError(f"{name} is {value}; it is a share: above 0, at most 1")
