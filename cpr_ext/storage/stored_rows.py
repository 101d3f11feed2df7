"""Rows as their segments have them: merged without decoding, so that none is rounded twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from cpr_ext.state.precision import EXACT
from cpr_ext.storage.segment_format import ArraySpec, in_memory
from cpr_ext.storage.segment_reader import SegmentRows


class ExactRows(NamedTuple):
    """Rows of a chunk that are kept as float32 although their arrays are rounded.

    Attributes:
        positions: (k,) int64, ascending, in the chunk.
        arrays: (k, ...) of each rounded array.
    """

    positions: torch.Tensor
    arrays: dict[str, torch.Tensor]


@dataclass
class StoredBlock:
    """The newest state of rows, as a segment with given arrays is to have them.

    Attributes:
        row_ids: (n,) int64, ascending.
        arrays: of rounded arrays (n, file_row_bytes) uint8, of others (n, ...).
        steps: (n,) int64; -1: no segment holds the row.
        marks: (n,) uint8, which rows are rounded, see ``rounded_chunks.py``.
        exact: rows that are kept as float32, by position in the block.
        largest_error: of rounded values.
    """

    row_ids: torch.Tensor
    arrays: dict[str, torch.Tensor]
    steps: torch.Tensor
    marks: torch.Tensor
    exact: list[ExactRows] = field(default_factory=list)
    largest_error: float = 0.0

    def exact_in(self, begin: int, end: int) -> ExactRows | None:
        """Return the exact rows of [begin, end), their positions counted from ``begin``."""
        if not self.exact:
            return None
        positions = torch.cat([each.positions for each in self.exact])
        chosen = torch.nonzero((positions >= begin) & (positions < end)).flatten()
        chosen = chosen[positions[chosen].argsort()]
        names = self.exact[0].arrays
        return ExactRows(
            positions[chosen] - begin,
            {n: torch.cat([each.arrays[n] for each in self.exact])[chosen] for n in names},
        )


def merged_arrays(
    table: str, arrays: Sequence[ArraySpec], segments: Sequence[SegmentRows], *, has_base: bool
) -> tuple[ArraySpec, ...]:
    """Return the arrays of a segment into which others are merged, oldest first.

    An array keeps a precision that most rows have, unless that is more bytes than float32.
    """
    specs = [spec for segment in segments if (spec := segment.table(table)) is not None]
    chosen = []
    for array in arrays:
        rows: dict[str, int] = {}
        for spec in specs[:1] if has_base else specs:
            found = next((each for each in spec.arrays if each.name == array.name), None)
            precision = EXACT if found is None else found.precision
            rows[precision] = rows.get(precision, 0) + spec.num_rows
        best = max(rows, key=lambda precision: rows[precision])
        rounded = replace(array, precision=best)
        others = sum(rows.values()) - rows[best]
        rounded_bytes = sum(rows.values()) * rounded.file_row_bytes + others * array.row_bytes
        is_smaller = rounded_bytes < sum(rows.values()) * array.row_bytes
        chosen.append(rounded if is_smaller else in_memory(array))
    return tuple(chosen)


def newest_stored(
    table: str, segments: Sequence[SegmentRows], arrays: Sequence[ArraySpec], row_ids: torch.Tensor
) -> StoredBlock:
    """Read the newest state of rows from segments, oldest first, as ``arrays`` are to have it.

    Raises:
        DamageError: a chunk that holds one of them is damaged.
    """
    count = len(row_ids)
    block = StoredBlock(
        row_ids,
        {array.name: _zeros(count, array) for array in arrays},
        torch.full((count,), -1, dtype=torch.int64),
        torch.zeros(count, dtype=torch.uint8),
    )
    missing = torch.ones(count, dtype=torch.bool)
    for segment in reversed(segments):
        for chunk in segment.chunks_of(table):
            if not missing.any():
                return block
            at = segment.positions(chunk, row_ids)
            if at is None:
                continue
            where, hit = at
            hit &= missing[where]
            where = where[hit]
            if len(where):
                _take(block, segment, chunk, arrays, where)
                missing[where] = False
    return block


def _zeros(count: int, array: ArraySpec) -> torch.Tensor:
    if array.is_rounded:
        return torch.zeros((count, array.file_row_bytes), dtype=torch.uint8)
    return torch.zeros((count, *array.row_shape), dtype=array.dtype)


def _take(
    block: StoredBlock,
    segment: SegmentRows,
    chunk: int,
    arrays: Sequence[ArraySpec],
    where: torch.Tensor,
) -> None:
    """Copy rows of a chunk into the positions ``where`` of a block."""
    table, first, _, step, _ = segment.segment.chunks[chunk]
    layout = segment.segment.layout
    held = {array.name: array for array in layout.tables[table].arrays}
    rounding = layout.rounding.get((table, first))
    rounded = [array for array in arrays if array.is_rounded]
    # Of an array that the segment lacks all rows are zero, in any precision.
    is_like = all(held.get(array.name, array).precision == array.precision for array in rounded)
    source = torch.searchsorted(segment.row_ids(chunk), block.row_ids[where])
    read = segment.rows(chunk)
    decoded = read.arrays
    is_exact = torch.ones(len(where), dtype=torch.bool)
    if rounded and is_like:
        stored, exact = segment.stored(chunk)
        is_exact = torch.isin(source, exact)
        for array in rounded:
            if array.name in stored:
                block.arrays[array.name][where] = stored[array.name][source]
    for array in arrays:
        if not array.is_rounded and array.name in decoded:
            block.arrays[array.name][where] = decoded[array.name][source]
    block.steps[where] = step
    block.marks[where] = read.marks[source]
    if rounding is not None:
        block.largest_error = max(block.largest_error, rounding.largest_error)
    if rounded and is_exact.any():
        chosen = source[is_exact]
        zeros = torch.zeros
        block.exact.append(
            ExactRows(
                where[is_exact],
                {
                    array.name: decoded[array.name][chosen]
                    if array.name in decoded
                    else zeros((len(chosen), *array.row_shape), dtype=array.dtype)
                    for array in rounded
                },
            )
        )
