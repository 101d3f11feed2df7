"""The newest state of rows of one table in one shard, laid together from its segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cpr_ext.errors import DamageError
from cpr_ext.storage.segment_format import ArraySpec, in_memory
from cpr_ext.storage.segment_reader import SegmentRows


@dataclass(frozen=True)
class Rows:
    """Rows of one table.

    Attributes:
        row_ids: (n,) int64.
        arrays: ``weight`` (n, embedding_dim) and each per-row optimizer state (n, ...).
        steps: (n,) int64, the step at which each row was captured; -1: not known, as compaction
            merged the row with those of other steps.
        not_after: (n,) int64, no row was captured after this step; -1: no segment holds it.
        marks: (n,) uint8, which rows are rounded, see ``rounded_chunks.py``.
    """

    row_ids: torch.Tensor
    arrays: dict[str, torch.Tensor]
    steps: torch.Tensor
    not_after: torch.Tensor
    marks: torch.Tensor


# (segment file, chunk, rows in it, error): what is damaged, and passed over.
DamageHandler = Callable[[Path, int, int, DamageError], None]


class NewestRows:
    """The rows of ``table`` in the given segments; where they overlap the last one wins.

    With ``on_damage``, damaged chunks are reported to it and rows fall back to older segments;
    without it, they raise.

    Raises:
        DamageError: the segments do not agree on an array's dtype or row shape.
    """

    def __init__(
        self,
        table: str,
        segments: Sequence[SegmentRows],
        *,
        on_damage: DamageHandler | None = None,
    ) -> None:
        self.table = table
        self._on_damage = on_damage
        self.segments = [segment for segment in segments if segment.chunks_of(table)]
        found: dict[str, ArraySpec] = {}
        for segment in self.segments:
            spec = segment.table(table)
            assert spec is not None
            for array in spec.arrays:
                if not found.setdefault(array.name, in_memory(array)).is_like(array):
                    raise DamageError(
                        f"{segment.segment.path}: '{table}/{array.name}' is {array.dtype} with "
                        f"rows of shape {array.row_shape}, in an older segment it is not"
                    )
        self.arrays: tuple[ArraySpec, ...] = tuple(found.values())

    def range(self, begin: int, end: int) -> Rows:
        """Read rows [begin, end), with memory for them and one chunk.

        Raises:
            DamageError: a chunk that overlaps them is damaged.
        """
        return self._newest(torch.arange(begin, end))

    def chosen(self, row_ids: torch.Tensor) -> Rows:
        """Read rows ``row_ids`` (n,) int64, ascending and unique; reads only their chunks.

        Raises:
            DamageError: a chunk that holds one of them is damaged.
        """
        return self._newest(row_ids)

    def all_row_ids(self) -> torch.Tensor:
        """Return (n,) int64, ascending: every row that one of the segments holds."""
        found = [
            segment.row_ids(chunk)
            for segment in self.segments
            for chunk in segment.chunks_of(self.table)
        ]
        return torch.unique(torch.cat(found)) if found else torch.empty(0, dtype=torch.int64)

    def _newest(self, row_ids: torch.Tensor) -> Rows:
        count = len(row_ids)
        # An optimizer's state that was made after a segment was captured is zero in it.
        arrays = {
            array.name: torch.zeros((count, *array.row_shape), dtype=array.dtype)
            for array in self.arrays
        }
        steps = torch.full((count,), -1, dtype=torch.int64)
        not_after = steps.clone()
        marks = torch.zeros(count, dtype=torch.uint8)
        missing = torch.ones(count, dtype=torch.bool)
        for segment in reversed(self.segments):
            for chunk in segment.chunks_of(self.table):
                if not missing.any():
                    break
                try:
                    at = segment.positions(chunk, row_ids)
                    if at is None:
                        continue
                    rows = segment.rows(chunk)
                except DamageError as error:
                    if self._on_damage is None:
                        raise
                    held = segment.segment.chunks[chunk].num_rows
                    self._on_damage(segment.segment.path, chunk, held, error)
                    continue
                where, hit = at
                hit &= missing[where]
                where, source = where[hit], torch.searchsorted(rows.row_ids, row_ids[where[hit]])
                for name, values in rows.arrays.items():
                    arrays[name][where] = values[source]
                not_after[where] = rows.step
                steps[where] = -1 if segment.segment.is_merged else rows.step
                marks[where] = rows.marks[source]
                missing[where] = False
        return Rows(row_ids, arrays, steps, not_after, marks)
