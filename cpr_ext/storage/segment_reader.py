"""The rows of a segment, chunk by chunk, in buffers of their own: no table is needed to read them.

A chunk is read as a range of rows whose first array is its row ids. So the native reader checks
every piece of it, and one chunk bounds the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cpr_ext._native import native
from cpr_ext.errors import DamageError
from cpr_ext.storage import retries
from cpr_ext.storage.retries import damage_of
from cpr_ext.storage.segment_format import (
    ROW_IDS,
    ArraySpec,
    Chunk,
    Segment,
    SegmentLayout,
    TableSpec,
)

# The rows [begin, end) of each table, by name.
RowRanges = Mapping[str, tuple[int, int]]

_ROW_ID_SPEC = ArraySpec(ROW_IDS, torch.int64, ())


@dataclass(frozen=True)
class ChunkRows:
    """The rows of a chunk.

    Attributes:
        step: at which they were captured.
        row_ids: (count,) int64, ascending.
        arrays: weight and per-row states, each (count, ...).
    """

    step: int
    row_ids: torch.Tensor
    arrays: dict[str, torch.Tensor]


class SegmentRows:
    """Reads chunks of one segment, each verified.

    Args:
        segment: its header, read.
        row_ranges: rows [begin, end) that the segment may hold, by table; a row id outside is
            damage.
        direct_io: past the page cache, where the file system allows it.

    Attributes:
        bytes_read: of the file, so far, its header included.

    Raises:
        DamageError: the header describes what cannot be.
    """

    def __init__(
        self,
        segment: Segment,
        row_ranges: RowRanges,
        *,
        direct_io: bool = False,
    ) -> None:
        self.segment = segment
        self.bytes_read = segment.layout.header_bytes
        self._row_ranges = row_ranges
        self._direct_io = direct_io
        self._spans: dict[int, tuple[int, int]] = {}
        self._by_table: dict[str, list[int]] = {}
        self._specs = {spec.name: spec for spec in segment.layout.tables}
        self._check()

    def _check(self) -> None:
        tables, path = self.segment.layout.tables, self.segment.path
        for index, chunk in enumerate(self.segment.chunks):
            self._by_table.setdefault(tables[chunk.table].name, []).append(index)
        for spec in tables:
            if spec.name not in self._row_ranges:
                raise DamageError(f"{path}: the store has no table '{spec.name}'")
            begin, end = self._row_ranges[spec.name]
            first_row = spec.range_begin
            inside = first_row is None or begin <= first_row <= end - spec.num_rows
            if spec.num_rows > end - begin or not inside:
                raise DamageError(
                    f"{path}: {spec.num_rows} rows of '{spec.name}', which are not among rows "
                    f"[{begin}, {end}) of the table"
                )

    def table(self, name: str) -> TableSpec | None:
        """Return what the segment holds of a table; None if nothing."""
        return self._specs.get(name)

    def is_rounded(self, name: str) -> bool:
        """Return whether it has rows of a table in fewer bits than in memory."""
        return name in self._specs and self._specs[name].is_rounded

    def chunks_of(self, table: str) -> Sequence[int]:
        """Return numbers of the chunks that hold rows of ``table``, ascending by row id."""
        return self._by_table.get(table, ())

    def is_run(self, chunk: int) -> bool:
        """Return whether a chunk's rows are consecutive, so that their ids are not stored."""
        table = self.segment.chunks[chunk].table
        return self.segment.layout.tables[table].range_begin is not None

    def span(self, chunk: int) -> tuple[int, int]:
        """Return the range [begin, end) of a chunk's rows; read its row ids, if any, only once."""
        table, first, count, _, _ = self.segment.chunks[chunk]
        range_begin = self.segment.layout.tables[table].range_begin
        if range_begin is not None:
            return range_begin + first, range_begin + first + count
        if chunk not in self._spans:
            row_ids = self.row_ids(chunk)
            self._spans[chunk] = int(row_ids[0]), int(row_ids[-1]) + 1
        return self._spans[chunk]

    def may_hold(self, chunk: int, ranges: RowRanges) -> bool:
        """Return whether a chunk may hold a row of some ranges [begin, end); a damaged one may."""
        spec = self.segment.layout.tables[self.segment.chunks[chunk].table]
        first, last = ranges[spec.name]
        if first == last:
            return False
        try:
            begin, end = self.span(chunk)
        except DamageError:
            return True
        return begin < last and first < end

    def chunks_in(self, ranges: RowRanges) -> list[Chunk]:
        """Return the chunks that :meth:`may_hold` a row of some ranges."""
        chunks = enumerate(self.segment.chunks)
        return [chunk for number, chunk in chunks if self.may_hold(number, ranges)]

    def row_ids(self, chunk: int) -> torch.Tensor:
        """Read (count,) int64, the rows of a chunk; reads no other array.

        Raises:
            DamageError: they are damaged.
        """
        table, first, count, _, crcs = self.segment.chunks[chunk]
        spec = self.segment.layout.tables[table]
        if spec.range_begin is not None:
            begin = spec.range_begin + first
            return torch.arange(begin, begin + count)
        arrays = self._read(chunk, (_ROW_ID_SPEC,), crcs[:1])
        return self._checked(spec, arrays[ROW_IDS])

    def rows(self, chunk: int) -> ChunkRows:
        """Read a chunk and verify every piece of it.

        Raises:
            DamageError: names the file and what is wrong with it.
        """
        table, first, count, step, crcs = self.segment.chunks[chunk]
        spec = self.segment.layout.tables[table]
        arrays = self._read(chunk, SegmentLayout.stored(spec), crcs)
        if spec.range_begin is None:
            row_ids = self._checked(spec, arrays.pop(ROW_IDS))
        else:
            row_ids = torch.arange(spec.range_begin + first, spec.range_begin + first + count)
        return ChunkRows(step, row_ids, arrays)

    def positions(
        self, chunk: int, row_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return positions in ``row_ids`` inside a chunk's span, and which of them it holds."""
        begin, end = self.span(chunk)
        bounds = torch.searchsorted(row_ids, torch.tensor([begin, end]))
        low, high = int(bounds[0]), int(bounds[1])
        if low == high:
            return None
        held = self.row_ids(chunk)
        where = torch.arange(low, high)
        found = torch.searchsorted(held, row_ids[low:high])
        hit = held[found] == row_ids[low:high]
        return (where, hit) if bool(hit.any()) else None

    def _checked(self, spec: TableSpec, row_ids: torch.Tensor) -> torch.Tensor:
        begin, end = self._row_ranges[spec.name]
        ascending = bool((row_ids[1:] > row_ids[:-1]).all())
        if not ascending or int(row_ids[0]) < begin or int(row_ids[-1]) >= end:
            raise DamageError(
                f"{self.segment.path}: row ids of '{spec.name}' out of order or of [{begin}, {end})"
            )
        return row_ids

    def _read(
        self, chunk: int, stored: Sequence[ArraySpec], crcs: list[int]
    ) -> dict[str, torch.Tensor]:
        table, first, count, step, _ = self.segment.chunks[chunk]
        arrays = {
            array.name: torch.empty((count, *array.row_shape), dtype=array.dtype)
            for array in stored
        }
        segment = self.segment
        one_range = native.SegmentTable(
            name=segment.layout.tables[table].name,
            num_rows=count,
            block_bytes=segment.layout.block_bytes,
        )
        for array in stored:
            offset = self._offset(table, array, first)
            one_range.add_rows(array.name, arrays[array.name], offset, precision=array.precision)
        result = native.restore_segment(
            path=str(segment.path),
            tables=[one_range],
            wanted=[(0, count)],
            chunks=[(0, 0, count, step, crcs)],
            slots=native.SlotPool(num_slots=1, slot_bytes=one_range.chunk_bytes(count)),
            direct_io=self._direct_io,
            pauses_seconds=retries.pauses_seconds,
        )
        self.bytes_read += result["bytes_read"]
        if error := damage_of(segment.path, result):
            raise error
        return arrays

    def _offset(self, table: int, array: ArraySpec, first: int) -> int:
        return self.segment.layout.offset(table, array.name) + first * array.file_row_bytes
