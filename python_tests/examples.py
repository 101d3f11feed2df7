"""How many examples a property is tried with."""

from __future__ import annotations

import os

from hypothesis import settings

#: Under a sanitizer an example takes ten times as long, and shows other faults than wrong results.
_FEWER = {"sanitize": 4, "threads": 12}


def examples(number: int) -> settings:
    """Settings with this many examples, or with a part of them under a sanitizer's profile."""
    divisor = _FEWER.get(os.environ.get("CPR_EXT_HYPOTHESIS", "dev"), 1)
    return settings(max_examples=max(5, number // divisor))
