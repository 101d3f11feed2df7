"""Which segments of a shard may be merged into one, so that every recovery point stays reachable.

Pure functions of manifests: nothing is read or written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpr_ext.storage.file_names import Kind, segment_name
from cpr_ext.storage.manifest import SegmentRecord


@dataclass(frozen=True)
class Merge:
    """Segments that become one.

    Attributes:
        sources: neighbours in the manifest, oldest first; the merged one takes their place.
        read: those of them whose rows it takes; a base among them supersedes what is older.
        kind: ``base`` if its rows are all rows of the shard, else ``merged``.
    """

    sources: tuple[SegmentRecord, ...]
    read: tuple[SegmentRecord, ...]
    kind: Kind

    @property
    def snapshot(self) -> int:
        """Number of the merged segment: that of its newest source."""
        return self.sources[-1].snapshot


def recovery_points(dense: Sequence[SegmentRecord]) -> list[int]:
    """Snapshots that one can go back to: the newest and every kept full-recovery point."""
    return sorted({r.snapshot for r in dense if r.is_complete} | {r.snapshot for r in dense[-1:]})


def plan_merges(segments: Sequence[SegmentRecord], points: Sequence[int]) -> list[Merge]:
    """Return what to merge in a shard, given the recovery points (ascending), oldest first.

    Only segments between the same two points are merged: each point can then still be reached by
    dropping the segments that are newer. Segments newer than the last point are left alone, as the
    snapshot they belong to may not be committed as a whole yet.
    """
    merges = []
    older = -1
    for point in points:
        sources = tuple(r for r in segments if older < r.snapshot <= point)
        older = point
        if len(sources) < 2:
            continue
        bases = [index for index, record in enumerate(sources) if record.kind == "base"]
        read = sources[bases[-1] :] if bases else sources
        merge = Merge(sources, read, "base" if bases else "merged")
        # Its file must be a new one: a base that supersedes the rest, or a merged segment that
        # already has this number, waits for the next point.
        if segment_name(merge.snapshot, merge.kind) not in {record.file for record in sources}:
            merges.append(merge)
    return merges
