"""Where training is, and how far a store can count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cpr_ext.errors import UsageError

# Counts continue from what a manifest says, so each limit leaves room below the next: a store that
# verifies can be written, and what was written can be read.
MAX_COUNT = 2**62  # in a manifest that is read
MAX_WRITABLE = 2**61  # in one that is opened for writing
MAX_SOUND = 2**60  # in one that verifies


def is_count(value: Any) -> bool:
    """Return whether it is an int from 0 to ``MAX_COUNT``."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def require_sound(step: int, num_samples: int) -> None:
    """Raise UsageError for a position of which a store would not verify."""
    for name, value in (("step", step), ("num_samples", num_samples)):
        if value > MAX_SOUND:
            raise UsageError(
                f"{name} is {value}; a store counts to {MAX_SOUND}. Give the number that training "
                "has done"
            )


@dataclass(frozen=True)
class Position:
    """Where training was when a dense part was captured.

    Attributes:
        step, num_samples: steps and samples done.
        values: what the caller's callables returned, by name.
        rows_unsaved: rows that had changed since their newest saved state; None: not known.
        samples_lost: samples whose effect failures had taken from lost shards until then.
    """

    step: int
    num_samples: int
    values: dict[str, Any]
    rows_unsaved: int | None = None
    samples_lost: int = 0
