"""The live segments of a shard, as a recovery finds them: usable, or damaged in part or wholly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cpr_ext.errors import DamageError
from cpr_ext.recovery.findings import Findings
from cpr_ext.storage.manifest import Manifest, SegmentRecord
from cpr_ext.storage.segment_reader import SegmentRows
from cpr_ext.storage.store_reader import open_segment

Ranges = Mapping[str, tuple[int, int]]


@dataclass
class UsableSegment:
    """A segment whose header is sound.

    Attributes:
        damaged: numbers of chunks of which nothing was restored.
    """

    record: SegmentRecord
    rows: SegmentRows
    damaged: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class ShardSegments:
    """The segments of one shard.

    Attributes:
        ranges: rows [begin, end) that the shard holds, by table.
        found: oldest first; a bare record: its header is not usable, so none of it is.
        marks: of each row (n,) uint8, whether it was restored rounded, by table; see
            ``rounded_chunks.py``. Empty: no segment has rounded rows.
    """

    ranges: Ranges
    found: list[UsableSegment | SegmentRecord]
    marks: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def usable(self) -> list[UsableSegment]:
        """Those with a sound header, oldest first."""
        return [segment for segment in self.found if isinstance(segment, UsableSegment)]

    @property
    def is_whole(self) -> bool:
        """Every row has its newest saved state for sure: nothing is damaged."""
        usable = self.usable
        has_base = any(segment.record.kind == "base" for segment in usable)
        return has_base and len(usable) == len(self.found) and not any(s.damaged for s in usable)

    def make_marks(self) -> None:
        """Make marks, all of exact rows, if a segment may have rounded ones."""
        segments = [usable.rows.segment for usable in self.usable]
        if any(segment.layout.is_rounded or segment.num_unsure for segment in segments):
            for name, (begin, end) in self.ranges.items():
                self.marks[name] = torch.zeros(end - begin, dtype=torch.uint8)

    def note_damage(
        self, findings: Findings, path: Path, chunk: int, num_rows: int, error: DamageError
    ) -> None:
        """Record a damaged chunk; it may be met several times, and counts once."""
        (segment,) = (s for s in self.usable if s.rows.segment.path == path)
        if chunk not in segment.damaged:
            segment.damaged.add(chunk)
            findings.add_damaged(path, type(error)(f"chunk {chunk}: {error}"), num_rows)


def open_shard(
    manifest: Manifest,
    records: Sequence[SegmentRecord],
    ranges: Ranges,
    findings: Findings,
    direct_io: bool,
) -> ShardSegments:
    """Open segments of a shard, oldest first; damaged headers are added to the findings."""
    found: list[UsableSegment | SegmentRecord] = []
    for record in records:
        try:
            segment = open_segment(manifest, record)
            rows = SegmentRows(segment, dict(ranges), direct_io=direct_io)
            found.append(UsableSegment(record, rows))
        except DamageError as error:
            findings.add_damaged(manifest.path_of(record), error)
            found.append(record)
    return ShardSegments(ranges, found)
