"""After damage: which rows are older than they were saved, by how many steps, and which are lost.

Recovery overwrites older segments by newer ones and knows only the rows that it wrote. This module
reads the row ids of segments again, a block of rows at a time. It compares each row's
newest saved state with the restored one. It runs only after damage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cpr_ext.errors import DamageError
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.segment_reader import SegmentRows
from cpr_ext.storage.store_reader import StoreReader

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
class OpenedSegments:
    """The segments of rows of a store, oldest first, as far as they can be opened.

    Attributes:
        found: oldest first; a bare record: its header is not usable, so none of it is.
    """

    found: list[UsableSegment | SegmentRecord]

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

    def note_damage(
        self, findings: RecoveryReport, path: Path, chunk: int, num_rows: int, error: DamageError
    ) -> None:
        """Record a damaged chunk; it may be met several times, and counts once."""
        (segment,) = (s for s in self.usable if s.rows.segment.path == path)
        if chunk not in segment.damaged:
            segment.damaged.add(chunk)
            findings.add_damaged(path, type(error)(f"chunk {chunk}: {error}"), num_rows)


def open_up_to(
    reader: StoreReader, snapshot: int, findings: RecoveryReport, direct_io: bool
) -> OpenedSegments:
    """Open all segments of rows up to a snapshot, also those that serve as a fallback.

    Damaged headers are added to the findings.
    """
    ranges = reader.manifest.model.row_ranges
    found: list[UsableSegment | SegmentRecord] = []
    for record in reader.manifest.rows:
        if record.snapshot > snapshot:
            break
        try:
            rows = SegmentRows(reader.open(record), ranges, direct_io=direct_io)
            found.append(UsableSegment(record, rows))
        except DamageError as error:
            findings.add_damaged(reader.path_of(record), error)
            found.append(record)
    return OpenedSegments(found)


BLOCK_ROWS = 1 << 18


@dataclass(frozen=True)
class _Span:
    """A chunk whose row ids are known: they are in [begin, end)."""

    begin: int
    end: int
    chunk: int


def account(opened: OpenedSegments, ranges: Ranges, findings: RecoveryReport) -> None:
    """Add the rows that are older, missing or possibly stale to the findings.

    Args:
        opened: the segments that rows were restored from.
        ranges: rows [begin, end) that were to be restored, by table.
    """
    if opened.is_whole:
        return
    for table, (begin, end) in ranges.items():
        tally = _Tally(table, opened)
        # An upper bound is the number of rows without a newer state, another that of rows lost.
        candidates = 0
        for first in range(begin, end, BLOCK_ROWS):
            candidates += tally.block(first, min(first + BLOCK_ROWS, end), findings)
        limit = tally.rows_unknown
        findings.rows_possibly_stale += candidates if limit is None else min(candidates, limit)


class _Tally:
    """Goes through the rows of one table."""

    def __init__(self, table: str, opened: OpenedSegments) -> None:
        self._table = table
        self._found = opened.found
        self._spans: list[list[_Span]] = []
        self._newest_unknown = -1  # the newest segment that lost rows, its row ids with them
        self.rows_unknown: int | None = 0  # how many rows that were; None: unknown, too
        for index, segment in enumerate(opened.found):
            if isinstance(segment, UsableSegment):
                self._spans.append(list(self._known(index, segment)))
                continue
            self._spans.append([])
            if segment.kind != "base":  # a base held every row
                self._newest_unknown, self.rows_unknown = index, None

    def _known(self, index: int, segment: UsableSegment) -> Iterator[_Span]:
        for chunk in segment.rows.chunks_of(self._table):
            try:
                yield _Span(*segment.rows.span(chunk), chunk)
            except DamageError:
                self._newest_unknown = index
                if self.rows_unknown is not None:
                    self.rows_unknown += segment.rows.segment.chunks[chunk][2]

    def block(self, begin: int, end: int, findings: RecoveryReport) -> int:
        """Account for rows [begin, end); how many of them have no state newer than an unknown."""
        count, table = end - begin, self._table
        # Of each row, the number of the segment and the step: saved there last, and restored from.
        saved, restored = (torch.full((count,), -1, dtype=torch.int64) for _ in range(2))
        saved_step, restored_step = torch.zeros_like(saved), torch.zeros_like(saved)
        for index, segment in enumerate(self._found):
            if not isinstance(segment, UsableSegment):
                if segment.kind == "base":
                    saved[:], saved_step[:] = index, segment.last_step
                continue
            for span in self._overlapping(index, begin, end):
                held = segment.rows.row_ids(span.chunk)
                at = held[(held >= begin) & (held < end)] - begin
                step = segment.rows.segment.chunks[span.chunk][3]
                saved[at], saved_step[at] = index, step
                if span.chunk not in segment.damaged:
                    restored[at], restored_step[at] = index, step
        is_missing = restored < 0
        is_older = (saved > restored) & ~is_missing
        row_ids = torch.arange(begin, end)
        findings.add_missing(table, row_ids[is_missing])
        findings.add_older(table, row_ids[is_older], (saved_step - restored_step)[is_older])
        is_in_question = (restored < self._newest_unknown) & ~is_missing & ~is_older
        return int(is_in_question.sum())

    def _overlapping(self, index: int, begin: int, end: int) -> Iterator[_Span]:
        spans = self._spans[index]
        for at in range(bisect_left(spans, begin + 1, key=lambda span: span.end), len(spans)):
            if spans[at].begin >= end:
                return
            yield spans[at]
