"""Counters of row updates that are not saved: one for each lookup of a row in a training step.

A native ``AccessCounter`` counts exactly that, from the moment its row was last captured.
"""

from __future__ import annotations

from typing import Any

from cpr_ext._native import native


def native_tracker(kind: str, device: int | None, **options: Any) -> native.RowTracker:
    """Make a native tracker for a table on a CUDA device, or with None on the CPU.

    Args:
        kind: its class on the CPU, such as ``AccessCounter``.
        options: what it is made with.
    """
    if device is not None:
        kind, options = f"Device{kind}", {**options, "device": device}
    tracker: native.RowTracker = getattr(native, kind)(**options)
    return tracker


def unsaved_updates(tracker: native.RowTracker, begin: int, end: int) -> int | None:
    """Return updates of the rows [begin, end) since each was captured; None: not counted."""
    # An AccessCounter, on the CPU or on a device.
    return tracker.sum_counts(begin, end) if hasattr(tracker, "sum_counts") else None
