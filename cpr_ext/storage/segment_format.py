"""The segment file: a valid safetensors file laid out for direct I/O.

``docs/snapshot_format.md`` is the specification; this file mirrors it. Offsets are known before the
first row is captured, so rows are written in place and in any order. The header, which holds the
checksums, is written last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from cpr_ext.runtime.cuda import stager_of
from cpr_ext.state.dtypes import DTYPE_NAMES, list_dtypes
from cpr_ext.state.precision import EXACT, LEVELS, precision_of_row, stored_row_bytes
from cpr_ext.storage.lineage import WIDEST_ID
from cpr_ext.storage.rounded_chunks import (
    EXACT_ROW,
    ROUNDED_ROW,
    UNSURE_ROW,
    WIDEST_ERROR,
    IdRun,
    RoundedRows,
    RoundedTally,
    Rounding,
    id_runs_of,
)

ALIGNMENT: int = native.ALIGNMENT  # the block of direct I/O
SMALL_BLOCK: int = native.SMALL_BLOCK
FORMAT_VERSION = 1
MAX_HEADER_BYTES = 64 << 20
ROW_IDS = "row_ids"

# Placeholders as wide as a value can get, so that the header's size is known in advance.
_WIDEST_STEP = 2**63 - 1
_WIDEST_CHECKSUM = 2**32 - 1
NO_CHECKSUM = "00000000"  # in the place of a header's own, while it is computed


class Chunk(NamedTuple):
    """Rows of a segment that are captured and checksummed together.

    See ``csrc/pipeline/segment_plan.h``.

    Attributes:
        table: position in the segment's tables.
        first: position of its first row among the table's rows.
        num_rows: how many rows it has.
        step: training step of the capture.
        checksums: CRC32C of each array's rows, row ids first if they are stored.
    """

    table: int
    first: int
    num_rows: int
    step: int
    checksums: list[int]


def align_up(size_bytes: int, block_bytes: int = ALIGNMENT) -> int:
    """Round up to a whole number of blocks."""
    return -(-size_bytes // block_bytes) * block_bytes


@dataclass(frozen=True)
class ArraySpec:
    """One array of a table in a segment.

    Attributes:
        dtype: in memory.
        row_shape: shape of a single row.
        precision: of float32 rows in the file, see :mod:`cpr_ext.state.precision`.
    """

    name: str
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    precision: str = EXACT

    @property
    def is_rounded(self) -> bool:
        """Return whether the file has fewer bits than memory."""
        return self.precision != EXACT

    def is_like(self, other: ArraySpec) -> bool:
        """Return whether both are the same in memory."""
        return (self.name, self.dtype, self.row_shape) == (
            *(other.name, other.dtype),
            other.row_shape,
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return self.dtype.itemsize * math.prod(self.row_shape)

    @property
    def file_row_bytes(self) -> int:
        """Bytes of one row in the file."""
        if not self.is_rounded:
            return self.row_bytes
        return stored_row_bytes(math.prod(self.row_shape), self.precision)

    def in_file(self) -> tuple[str, tuple[int, ...]]:
        """Return the dtype and the shape of a row, as safetensors has them."""
        if self.precision in LEVELS:
            return "U8", (self.file_row_bytes,)
        dtype = self.dtype if self.precision == EXACT else getattr(torch, self.precision)
        return DTYPE_NAMES[dtype], self.row_shape


def in_memory(array: ArraySpec) -> ArraySpec:
    """Return the array without rounding."""
    return replace(array, precision=EXACT)


@dataclass(frozen=True)
class TableSpec:
    """The rows of one table in a segment.

    Attributes:
        range_begin: first row id of a contiguous range, whose ids are not stored; None means that
            ``num_rows`` ascending row ids are.
        shape: of a tensor that is no table (the dense part): its one array, without a name, holds
            the elements as rows.
    """

    name: str
    num_rows: int
    range_begin: int | None
    arrays: tuple[ArraySpec, ...]
    shape: tuple[int, ...] | None = None

    @property
    def exact_row_bytes(self) -> int:
        """Bytes of a row that stays float32; 0: no row is rounded."""
        rounded = sum(array.row_bytes for array in self.arrays if array.is_rounded)
        return rounded + torch.int32.itemsize if rounded else 0


@dataclass(frozen=True)
class Committed:
    """What a manifest is to say of a segment, kept in its header too: it can then be rebuilt."""

    first_step: int = _WIDEST_STEP
    last_step: int = _WIDEST_STEP
    num_samples: int = _WIDEST_STEP
    is_complete: bool = False
    chain_before: str = WIDEST_ID
    merged_chain: str = WIDEST_ID  # of a merged segment: that of its newest source


@dataclass
class SegmentLayout:
    """The position of everything in a segment; created before anything is captured.

    Attributes:
        offsets: file offset in bytes of each stored array, by (table index, array name).
        block_bytes: arrays and chunks begin at a multiple of it: ``ALIGNMENT``, or
            ``SMALL_BLOCK`` in a segment of small arrays, see :func:`block_bytes_for`.
        header_bytes: size of the header, a whole number of blocks.
        file_bytes: size of the whole file, a whole number of blocks.
        id_runs: of a table whose row ids are packed, those of each chunk, by table index.
        rounding: of each chunk of rounded rows, by table index and first row.
        exact_offsets: where its exact rows are in the file, by the same.
    """

    tables: tuple[TableSpec, ...]
    metadata: dict[str, Any]
    block_bytes: int
    header_bytes: int = 0
    file_bytes: int = 0
    offsets: dict[tuple[int, str], int] = field(default_factory=dict)
    id_runs: dict[int, list[IdRun]] = field(default_factory=dict)
    rounding: dict[tuple[int, int], Rounding] = field(default_factory=dict)
    exact_offsets: dict[tuple[int, int], int] = field(default_factory=dict)
    _id_places: dict[int, dict[int, tuple[int, int, int]]] = field(default_factory=dict, repr=False)

    @property
    def is_rounded(self) -> bool:
        """Return whether an array is in fewer bits than in memory."""
        return any(table.exact_row_bytes for table in self.tables)

    def place(
        self,
        rows_per_chunk: list[int],
        row_ids: Sequence[np.ndarray[Any, np.dtype[np.int64]] | None] = (),
    ) -> None:
        """Fix every offset, for tables captured ``rows_per_chunk`` rows at a time.

        Args:
            row_ids: of each table, for a segment of rounded rows: it packs them.
        """
        widest: list[Chunk] = [
            Chunk(index, first, min(step, table.num_rows - first), _WIDEST_STEP, widest_checksums)
            for index, (table, step) in enumerate(zip(self.tables, rows_per_chunk, strict=True))
            for widest_checksums in [[_WIDEST_CHECKSUM] * (len(self.stored(table)) + 1)]
            for first in range(0, table.num_rows, step)
        ]
        if self.is_rounded:
            for index, (ids, step) in enumerate(zip(row_ids, rows_per_chunk, strict=True)):
                if ids is not None and self.tables[index].range_begin is None:
                    self.id_runs[index] = id_runs_of(ids, step)
        self.place_at(start=0)
        every_row = {
            chunk[:2]: Rounding(chunk.num_rows, WIDEST_ERROR)
            for chunk in widest
            if self.tables[chunk.table].exact_row_bytes
        }
        self.note_rounding(widest, every_row)
        self.header_bytes = self._align(8 + len(self._header_json(widest, Committed())))
        if self.header_bytes > MAX_HEADER_BYTES:
            raise UsageError(
                f"the segment's header would take {self.header_bytes} bytes of {MAX_HEADER_BYTES}; "
                "make slot_bytes larger, or give large extra state as tensors"
            )
        self.rounding, self.exact_offsets = {}, {}
        self.place_at(start=self.header_bytes)

    def note_rounding(
        self, chunks: Sequence[Chunk], rounding: Mapping[tuple[int, int], Rounding]
    ) -> None:
        """Fix the places of exact rows, which follow all else in the order of the chunks."""
        self.rounding = dict(rounding)
        self.exact_offsets = {}
        for table, first, *_ in chunks:
            if not (of_chunk := rounding.get((table, first))) or not of_chunk.num_exact:
                continue
            self.exact_offsets[table, first] = self.file_bytes
            self.file_bytes += self._align(of_chunk.num_exact * self.tables[table].exact_row_bytes)

    def place_at(self, start: int) -> None:
        """Fix every offset, the first array at ``start``."""
        offset = start
        for index, table in enumerate(self.tables):
            for array in self.stored(table):
                self.offsets[index, array.name] = offset
                offset += self._align(self._array_bytes(index, array))
        self.file_bytes = offset

    def _align(self, size_bytes: int) -> int:
        return align_up(size_bytes, self.block_bytes)

    def _array_bytes(self, index: int, array: ArraySpec) -> int:
        if array.name == ROW_IDS and index in self.id_runs:
            return sum(self._align(run.packed_bytes) for run in self.id_runs[index])
        return self.tables[index].num_rows * array.file_row_bytes

    @staticmethod
    def stored(table: TableSpec) -> tuple[ArraySpec, ...]:
        """Return the arrays of a table in the order of the file: row ids first, if stored."""
        if table.range_begin is not None:
            return table.arrays
        return (ArraySpec(ROW_IDS, torch.int64, ()), *table.arrays)

    def row_ids_offset(self, index: int, first: int) -> int:
        """Return file offset of the row ids of the chunk at row ``first``."""
        offset = self.offset(index, ROW_IDS)
        if index not in self.id_runs:
            return offset + first * torch.int64.itemsize
        return offset + self._id_chunks(index)[first][0]

    def id_bounds(self, index: int, first: int) -> tuple[int, int]:
        """Return the smallest and the largest id of the chunk at row ``first``, if packed."""
        return self._id_chunks(index)[first][1:]

    def _id_chunks(self, index: int) -> dict[int, tuple[int, int, int]]:
        """Return offset, smallest and largest id of each chunk of packed ids, by first row."""
        if index not in self._id_places:
            first = offset = 0
            places = self._id_places[index] = {}
            for run in self.id_runs[index]:
                places[first] = offset, run.first, run.last
                first += run.num_ids
                offset += self._align(run.packed_bytes)
        return self._id_places[index]

    def rows_bytes(self, index: int, count: int) -> int:
        """Return the slot bytes of ``count`` rows of table ``index``, captured as one chunk.

        Packed row ids take less; exact rows are not counted.
        """
        return sum(
            align_up(count * array.file_row_bytes) for array in self.stored(self.tables[index])
        )

    def most_chunk_bytes(self, chunk: Chunk) -> int:
        """Return the bytes that a chunk takes in a slot at most."""
        rounding = self.rounding.get(chunk[:2])
        exact_rows = rounding.num_exact if rounding is not None else 0
        exact_bytes = exact_rows * self.tables[chunk.table].exact_row_bytes
        return self.rows_bytes(chunk.table, chunk.num_rows) + align_up(exact_bytes)

    def bytes_by_precision(self) -> dict[str, int]:
        """Return what rows take, without padding, by precision: "exact", "int8", ..., "row ids"."""
        sizes: dict[str, int] = {}
        for index, table in enumerate(self.tables):
            for array in self.stored(table):
                kept_as = array.precision if array.is_rounded else "exact"
                size_bytes = table.num_rows * array.file_row_bytes
                if array.name == ROW_IDS:
                    kept_as = "row ids"
                    if index in self.id_runs:
                        size_bytes = sum(run.packed_bytes for run in self.id_runs[index])
                sizes[kept_as] = sizes.get(kept_as, 0) + size_bytes
        for (index, _), rounding in self.rounding.items():
            num_bytes = rounding.num_exact * self.tables[index].exact_row_bytes
            sizes["exact"] = sizes.get("exact", 0) + num_bytes
        return sizes

    def offset(self, index: int, array: str) -> int:
        """Return file offset of an array of table ``index``; 0 while nothing is placed."""
        return self.offsets.get((index, array), 0)

    def header(self, chunks: list[Chunk], committed: Committed) -> bytes:
        """Return the finished header block, ``header_bytes`` long."""
        text = self._header_json(chunks, committed)
        assert 8 + len(text) <= self.header_bytes, "the header outgrew its planned size"
        padded = text.ljust(self.header_bytes - 8, b" ")
        block = len(padded).to_bytes(8, "little") + padded
        return with_checksum(block, f"{native.crc32c(block):08x}", of=NO_CHECKSUM)

    def _header_json(self, chunks: list[Chunk], committed: Committed) -> bytes:
        entries: dict[str, Any] = {}
        pads = 0
        start = self.header_bytes
        for index, table in enumerate(self.tables):
            for array in self.stored(table):
                begin = self.offsets[index, array.name] - start
                end = begin + self._array_bytes(index, array)
                name = f"{table.name}/{array.name}" if array.name else table.name
                dtype, row_shape = array.in_file()
                shape = (table.num_rows, *row_shape) if table.shape is None else table.shape
                if array.name == ROW_IDS and index in self.id_runs:
                    dtype, shape = "U8", (end - begin,)
                entries[name] = {
                    "dtype": dtype,
                    "shape": shape,
                    "data_offsets": [begin, end],
                }
                # safetensors allows no holes: what aligns the next array is a tensor, too.
                if pad := self._align(end) - end:
                    entries[f"__pad.{pads}"] = {
                        "dtype": "U8",
                        "shape": [pad],
                        "data_offsets": [end, end + pad],
                    }
                    pads += 1
        if self.exact_offsets:
            begin, end = min(self.exact_offsets.values()) - start, self.file_bytes - start
            entries["__exact"] = {
                "dtype": "U8",
                "shape": [end - begin],
                "data_offsets": [begin, end],
            }
        kinds = {arrays: i for i, arrays in enumerate(dict.fromkeys(t.arrays for t in self.tables))}
        own = {
            **self.metadata,
            "block_bytes": self.block_bytes,
            "arrays": [[_described(array) for array in arrays] for arrays in kinds],
            "tables": [
                self._described(index, kinds[table.arrays])
                for index, table in enumerate(self.tables)
            ],
            "chunks": [[*chunk[:4], [f"{crc:08x}" for crc in chunk.checksums]] for chunk in chunks],
        }
        if self.is_rounded:
            own["rounding"] = [
                [*at, rounding.num_exact, rounding.largest_error]
                for at, rounding in self.rounding.items()
            ]
        header = {
            "__metadata__": {
                "format": "cpr_ext.segment",
                "format_version": str(FORMAT_VERSION),
                "header_crc32c": NO_CHECKSUM,
                "committed": json.dumps(asdict(committed), separators=(",", ":")),
                "cpr_ext": json.dumps(own, separators=(",", ":")),
            },
            **entries,
        }
        return json.dumps(header, separators=(",", ":")).encode()

    def _described(self, index: int, arrays: int) -> dict[str, Any]:
        table = self.tables[index]
        described: dict[str, Any] = {
            "name": table.name,
            "num_rows": table.num_rows,
            "arrays": arrays,
        }
        if table.range_begin is not None:
            described["range_begin"] = table.range_begin
        if table.shape is not None:
            described["shape"] = table.shape
        if index in self.id_runs:
            described["row_id_runs"] = self.id_runs[index]
        return described


def _described(array: ArraySpec) -> list[Any]:
    described = [array.name, DTYPE_NAMES[array.dtype], list(array.row_shape)]
    return [*described, array.precision] if array.is_rounded else described


def with_checksum(header: bytes, checksum: str, *, of: str) -> bytes:
    """Return a header block with another value in the place of its own checksum ``of``."""
    # The first of its kind: names that come from users follow later.
    old, new = (f'"header_crc32c":"{text}"'.encode() for text in (of, checksum))
    return header.replace(old, new, 1)


def block_bytes_for(tables: Sequence[TableSpec]) -> int:
    """Return the block of a segment of these tables: the small one where padding would count.

    Large arrays are written past the page cache, for which each begins at a multiple of
    ``ALIGNMENT``. Where that padding is more than 1/64 of the rows, arrays follow each other
    closely instead, and the file is written through the page cache.
    """
    sizes = [
        table.num_rows * array.file_row_bytes
        for table in tables
        for array in SegmentLayout.stored(table)
    ]
    padding = sum(align_up(size) - size for size in sizes)
    return ALIGNMENT if padding * 64 <= sum(sizes) else SMALL_BLOCK


def array_specs(
    table: str,
    arrays: Mapping[str, torch.Tensor],
    precision_of: Callable[[str], str] = lambda name: EXACT,
) -> tuple[ArraySpec, ...]:
    """Return what a segment notes of a table's tensors (num_rows, ...).

    Args:
        precision_of: precision of an array of float32 rows, by its name.

    Raises:
        UsageError: a dtype that safetensors cannot hold.
    """
    for name, tensor in arrays.items():
        if tensor.dtype not in DTYPE_NAMES:
            place = f"{table}/{name}" if name else table
            raise UsageError(f"'{place}' has dtype {tensor.dtype}; can be stored: {list_dtypes()}")
    return tuple(
        ArraySpec(
            name,
            tensor.dtype,
            tuple(tensor.shape[1:]),
            precision_of_row(math.prod(tensor.shape[1:]), precision_of(name))
            if tensor.dtype == torch.float32
            else EXACT,
        )
        for name, tensor in arrays.items()
    )


def native_table(
    layout: SegmentLayout,
    index: int,
    arrays: Mapping[str, torch.Tensor],
    row_ids: np.ndarray[Any, np.dtype[np.int64]] | None = None,
    *,
    is_packed: bool = False,
    first_row_id: int = 0,
    is_on_host: bool = False,
) -> Any:
    """Table ``index`` of a layout, joined with the tensors (num_rows, ...) its arrays come from.

    ``arrays`` may be those a capture reads or those a restore writes; ``row_ids`` is given for a
    capture of selected rows. If ``is_packed``, these rows alone are in ``arrays``. The first row of
    ``arrays`` is row ``first_row_id`` of the table. ``is_on_host``: no device has any of them.
    """
    spec = layout.tables[index]
    table = native.SegmentTable(
        name=spec.name,
        num_rows=spec.num_rows,
        row_ids_offset=-1 if spec.range_begin is not None else layout.offset(index, ROW_IDS),
        range_begin=spec.range_begin or 0,
        row_ids=row_ids,
        is_packed=is_packed,
        block_bytes=layout.block_bytes,
    )
    for array in spec.arrays:
        tensor = arrays[array.name]
        offset = layout.offset(index, array.name)
        stager = None if is_on_host else stager_of(tensor)
        table.add_rows(
            array.name,
            tensor,
            offset,
            first_row_id=first_row_id,
            stager=stager,
            precision=array.precision,
        )
    if row_ids is None:  # of a file to read
        _note_rounded(layout, index, table)
    return table


def place_native(layout: SegmentLayout, index: int, table: Any) -> None:
    """Set where in the file a native table has its rows, of a layout that was placed since."""
    spec = layout.tables[index]
    ids_offset = -1 if spec.range_begin is not None else layout.offset(index, ROW_IDS)
    table.place(ids_offset, [layout.offset(index, array.name) for array in spec.arrays])
    _note_rounded(layout, index, table)


def most_rounded(tally: RoundedTally, segments: Sequence[Segment]) -> RoundedRows:
    """Return how many of the rows counted are rounded, which came from these segments."""
    return tally.total(
        max((segment.rounded.largest_error for segment in segments), default=0.0),
        sum(segment.num_unsure for segment in segments),
    )


def _note_rounded(layout: SegmentLayout, index: int, table: Any) -> None:
    if index in layout.id_runs:
        table.pack_row_ids(layout.id_runs[index])
    if exact := [
        (first, layout.rounding[of_table, first].num_exact, offset)
        for (of_table, first), offset in layout.exact_offsets.items()
        if of_table == index
    ]:
        table.keep_exact(exact)


@dataclass(frozen=True)
class Segment:
    """A segment read back: its layout and its chunks with their checksums."""

    path: Path
    layout: SegmentLayout
    chunks: list[Chunk]

    @property
    def metadata(self) -> dict[str, Any]:
        """What the writer noted: kind, snapshot, steps."""
        return self.layout.metadata

    @property
    def is_merged(self) -> bool:
        """Return whether compaction made it: its chunks note the newest of their rows' steps."""
        return "merged_from" in self.metadata

    @property
    def rounded(self) -> RoundedRows:
        """Return how many of its rows were rounded, here or before they were merged."""
        noted = RoundedRows.noted(self.metadata)
        return self._rounded_here if noted is None else noted

    @property
    def num_unsure(self) -> int:
        """Return how many of its rows were rounded of which it does not say so, at most."""
        noted = RoundedRows.noted(self.metadata)
        return 0 if noted is None else max(0, noted.num_rows - self._rounded_here.num_rows)

    def marks(self, table: int) -> tuple[int, int]:
        """Return how rows of a table are marked that are rounded here, and that are not.

        If none of the table's arrays is rounded, both are the same.
        """
        not_here = UNSURE_ROW if self.num_unsure else EXACT_ROW
        is_rounded = self.layout.tables[table].exact_row_bytes
        return ROUNDED_ROW if is_rounded else not_here, not_here

    @cached_property
    def _rounded_here(self) -> RoundedRows:
        rounding = self.layout.rounding
        counts = {chunk[:2]: chunk.num_rows for chunk in self.chunks}
        here = [
            RoundedRows(counts[at] - of_chunk.num_exact, of_chunk.largest_error)
            for at, of_chunk in rounding.items()
        ]
        return RoundedRows.together(here)
