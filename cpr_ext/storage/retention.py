"""The history that a store keeps, and its segments. Pure functions of manifests."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from cpr_ext.runtime.validation import as_whole_number, require_flag
from cpr_ext.storage.manifest import Records, SegmentRecord

_MANY_POINTS = 500


@dataclass(frozen=True)
class Retention:
    """How much history to keep in addition to the newest snapshot, which is always kept.

    Attributes:
        full_recovery_points: how many full-recovery points ``recover(mode="full")`` and the tools
            can go back to, newest first; the newest snapshot counts if it is one. Points that use
            the same base snapshot share its rows, so they cost little; each one that uses an older
            base costs about as much as a base. All are listed in the manifest, which each snapshot
            writes: more than 500 without ``max_bytes`` warn.
        max_bytes: drop full-recovery points, oldest first, once the live files of the store
            together exceed this. The newest snapshot stays, even if it alone is larger.
        release_when_full: drop all of them if a snapshot failed because the disk is full.

    In a job with full recovery the newest point that all workers have stays whatever these say,
    and so do later ones. If a worker stops saving that may exceed ``max_bytes``; it warns.
    """

    full_recovery_points: int = 1
    max_bytes: int | None = None
    release_when_full: bool = False

    def __post_init__(self) -> None:
        points = as_whole_number("full_recovery_points", self.full_recovery_points, 0)
        if points > _MANY_POINTS and self.max_bytes is None:
            warnings.warn(
                f"full_recovery_points={points}: each snapshot writes the whole manifest again, "
                "about 250 bytes for each segment of all points. Keep fewer, or copies elsewhere",
                stacklevel=3,
            )
        if self.max_bytes is not None:
            as_whole_number("max_bytes", self.max_bytes, 1, ", or None")
        require_flag("release_when_full", self.release_when_full)


@dataclass(frozen=True)
class Kept:
    """The records that stay."""

    dense: Records
    rows: Records

    @property
    def file_bytes(self) -> int:
        """Size of their files."""
        return sum(record.file_bytes for record in (*self.dense, *self.rows))


def plan_retention(
    dense: Sequence[SegmentRecord],
    rows: Sequence[SegmentRecord],
    retention: Retention,
    keep_from_step: int | None = None,
) -> Kept:
    """Choose the records to keep: all that the newest snapshot or a kept full-recovery point needs.

    Points of ``keep_from_step`` and later stay, whatever ``retention`` says. Its time depends on
    the content of the store, not on the numbers there.
    """

    def keep(points: int) -> Kept:
        kept_dense = keep_points(dense, points)
        oldest = kept_dense[0].snapshot if kept_dense else 0
        return Kept(kept_dense, keep_needed(rows, oldest))

    steps = [record.last_step for record in dense if record.is_complete]
    least = 0 if keep_from_step is None else sum(step >= keep_from_step for step in steps)
    most = max(least, min(retention.full_recovery_points, len(steps)))
    max_bytes = retention.max_bytes
    if max_bytes is None:
        return keep(most)
    # Fewer points never need more bytes.
    fewer = bisect_left(
        range(most - least), True, key=lambda n: keep(most - n).file_bytes <= max_bytes
    )
    return keep(most - fewer)


def keep_points(dense: Sequence[SegmentRecord], full_recovery_points: int) -> Records:
    """Return the newest dense part and the newest ``full_recovery_points`` complete ones."""
    complete = [record.snapshot for record in dense if record.is_complete]
    wanted = set(complete[len(complete) - min(full_recovery_points, len(complete)) :])
    wanted |= {record.snapshot for record in dense[-1:]}
    return tuple(record for record in dense if record.snapshot in wanted)


def keep_needed(records: Sequence[SegmentRecord], oldest_point: int) -> Records:
    """Return the segments for snapshots from ``oldest_point`` on: from their newest base."""
    bases = [
        index
        for index, record in enumerate(records)
        if record.kind == "base" and record.snapshot <= oldest_point
    ]
    return tuple(records[bases[-1] if bases else 0 :])
