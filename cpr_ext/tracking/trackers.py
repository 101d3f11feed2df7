"""Counters of row updates that are not saved: one for each lookup of a row in a training step.

A native ``AccessCounter`` counts exactly that, from the moment its row was last captured. For
priorities that track something else, their tracker gets one in addition.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cpr_ext._native import native


def native_tracker(kind: str, device: int | None, **options: Any) -> Any:
    """Make a native tracker for a table on a CUDA device, or with None on the CPU.

    Args:
        kind: its class on the CPU, such as ``AccessCounter``.
        options: what it is made with.
    """
    if device is None:
        return getattr(native, kind)(**options)
    return getattr(native, f"Device{kind}")(**options, device=device)


class CountedTracker:
    """A tracker with an additional counter; taken from and put back together.

    The tracker handles all other calls.
    """

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        self.counter = native_tracker(
            "AccessCounter", tracker.device, name=tracker.name, num_rows=tracker.num_rows
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tracker, name)

    def take(self, row_ids: Any, **options: Any) -> Any:
        """Forget the counts of captured rows; return what ``put_back`` needs."""
        return self.tracker.take(row_ids, **options), self.counter.take(row_ids)

    def take_range(self, begin: int, end: int, **options: Any) -> Any:
        """Take the rows [begin, end), as :meth:`take` does."""
        return self.tracker.take_range(begin, end, **options), self.counter.take_range(begin, end)

    def put_back(self, taken: Any) -> None:
        """Undo :meth:`take` after a failed save."""
        self.tracker.put_back(taken[0])
        self.counter.put_back(taken[1])


def native_trackers(tracker: Any) -> tuple[Any, ...]:
    """Return the native trackers that count lookups of a table."""
    if isinstance(tracker, CountedTracker):
        return tracker.tracker, tracker.counter
    return (tracker,)


def forget_rows(taken: Any) -> None:
    """Free what a tracker returned for captured rows, which will not be put back."""
    for each in taken if isinstance(taken, tuple) else (taken,):
        each.forget()


def counts_updates(tracker: Any) -> bool:
    """Return whether a native tracker is a counter of row updates, on the CPU or on a device."""
    return hasattr(tracker, "counts")


def unsaved_updates(tracker: Any, begin: int, end: int) -> int | None:
    """Return updates of the rows [begin, end) since each was captured; None: not counted."""
    counter = native_trackers(tracker)[-1]
    if not counts_updates(counter):
        return None
    return int(counter.counts()[begin:end].sum(dtype=np.uint64))
