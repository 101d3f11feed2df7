"""Ranges [begin, end) of a table's rows."""

from __future__ import annotations

from collections.abc import Sequence

RowSpans = Sequence[tuple[int, int]]  # of rows [begin, end), ascending


def complement(ranges: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return the ranges of the rows [0, end) that none of these holds.

    Args:
        ranges: ascending.
    """
    kept, at = [], 0
    for first, last in ranges:
        if at < first:
            kept.append((at, first))
        at = max(at, last)
    return [*kept, (at, end)] if at < end else kept


def overlap(left: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]) -> bool:
    """Return whether a row [begin, end) of one list of ranges is in one of the other."""
    return any(a < d and c < b for a, b in left for c, d in right)
