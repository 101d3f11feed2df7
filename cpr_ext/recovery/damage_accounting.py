"""After damage: which rows are older than they were saved, by how many steps, and which are lost.

Recovery overwrites older segments by newer ones and knows only the rows that it wrote. This module
reads the row ids of a shard's segments again, a block of rows at a time. It compares each row's
newest saved state with the restored one. It runs only after damage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cpr_ext.errors import DamageError
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.segment_reader import SegmentRows

BLOCK_ROWS = 1 << 18


@dataclass
class Source:
    """A live segment of a shard, as a recovery found it.

    Attributes:
        rows: None: its header is not usable, so none of it is.
        damaged: numbers of chunks of which nothing was restored.
    """

    record: SegmentRecord
    rows: SegmentRows | None
    damaged: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Span:
    """A chunk whose row ids are known: they are in [begin, end)."""

    begin: int
    end: int
    chunk: int


def needs_account(sources: Sequence[Source]) -> bool:
    """False if every row has its newest saved state for sure: nothing is damaged."""
    is_whole = all(source.rows is not None and not source.damaged for source in sources)
    return not is_whole or not any(source.record.kind == "base" for source in sources)


def account(
    ranges: Mapping[str, tuple[int, int]], sources: Sequence[Source], report: RecoveryReport
) -> None:
    """Add the rows of a shard that are older, missing or in doubt to a report.

    Args:
        ranges: rows [begin, end) that were to be restored, by table.
        sources: the segments they were restored from, oldest first.
    """
    for table, (begin, end) in ranges.items():
        tally = _Tally(table, sources)
        # At most so many are in doubt; and no more than there are rows without a newer state.
        candidates = 0
        for first in range(begin, end, BLOCK_ROWS):
            candidates += tally.block(first, min(first + BLOCK_ROWS, end), report)
        limit = tally.rows_unknown
        report.rows_in_doubt += candidates if limit is None else min(candidates, limit)


class _Tally:
    """Goes through the rows of one table."""

    def __init__(self, table: str, sources: Sequence[Source]) -> None:
        self._table = table
        self._sources = sources
        self._spans: list[list[_Span]] = []
        self._newest_unknown = -1  # the newest source that lost rows without telling which
        self.rows_unknown: int | None = 0  # how many of them there are; None: not told either
        for index, source in enumerate(sources):
            self._spans.append(list(self._known(table, index, source)))

    def _known(self, table: str, index: int, source: Source) -> Iterator[_Span]:
        if source.rows is None:
            if source.record.kind != "base":  # a base held every row
                self._newest_unknown, self.rows_unknown = index, None
            return
        for chunk in source.rows.chunks_of(table):
            try:
                yield _Span(*source.rows.span(chunk), chunk)
            except DamageError:
                self._newest_unknown = index
                if self.rows_unknown is not None:
                    self.rows_unknown += source.rows.segment.chunks[chunk][2]

    def block(self, begin: int, end: int, report: RecoveryReport) -> int:
        """Account for rows [begin, end); how many of them have no state newer than an unknown."""
        count, table = end - begin, self._table
        # Of each row, the number of the source and the step: saved there last, and restored from.
        saved, restored = (torch.full((count,), -1, dtype=torch.int64) for _ in range(2))
        saved_step, restored_step = torch.zeros_like(saved), torch.zeros_like(saved)
        for index, source in enumerate(self._sources):
            if source.rows is None:
                if source.record.kind == "base":
                    saved[:], saved_step[:] = index, source.record.last_step
                continue
            for span in self._overlapping(index, begin, end):
                held = source.rows.row_ids(span.chunk)
                at = held[(held >= begin) & (held < end)] - begin
                step = source.rows.segment.chunks[span.chunk][3]
                saved[at], saved_step[at] = index, step
                if span.chunk not in source.damaged:
                    restored[at], restored_step[at] = index, step
        is_missing = restored < 0
        is_older = (saved > restored) & ~is_missing
        row_ids = torch.arange(begin, end)
        report.add_missing(table, row_ids[is_missing])
        report.add_older(table, row_ids[is_older], (saved_step - restored_step)[is_older])
        in_doubt = (restored < self._newest_unknown) & ~is_missing & ~is_older
        return int(in_doubt.sum())

    def _overlapping(self, index: int, begin: int, end: int) -> Iterator[_Span]:
        spans = self._spans[index]
        for at in range(bisect_left(spans, begin + 1, key=lambda span: span.end), len(spans)):
            if spans[at].begin >= end:
                return
            yield spans[at]
