"""The segment file: a valid safetensors file laid out for direct I/O.

``docs/snapshot_format.md`` is the specification; this file mirrors it. Offsets are known before the
first row is captured, so rows are written in place and in any order. The header, which holds the
checksums, is written last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from cpr_ext.runtime.cuda import stager_of
from cpr_ext.state.dtypes import DTYPE_NAMES, list_dtypes
from cpr_ext.state.precision import EXACT, precision_of_row, stored_row_bytes

ALIGNMENT: int = native.ALIGNMENT  # the block of direct I/O
SMALL_BLOCK: int = native.SMALL_BLOCK
FORMAT_VERSION: int = native.SEGMENT_VERSION
MAX_HEADER_BYTES: int = native.MAX_HEADER_BYTES
ROW_IDS = "row_ids"

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

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return self.dtype.itemsize * math.prod(self.row_shape)

    @cached_property
    def file_row_bytes(self) -> int:
        """Bytes of one row in the file."""
        if not self.is_rounded:
            return self.row_bytes
        return stored_row_bytes(math.prod(self.row_shape), self.precision)

    def in_file(self) -> tuple[str, tuple[int, ...]]:
        """Return the dtype and the shape of a row, as safetensors has them."""
        if self.is_rounded:
            return "U8", (self.file_row_bytes,)
        return DTYPE_NAMES[self.dtype], self.row_shape


_ROW_IDS = ArraySpec(ROW_IDS, torch.int64, ())


def in_memory(array: ArraySpec) -> ArraySpec:
    """Return the array without rounding."""
    return replace(array, precision=EXACT)


class TableSpec(NamedTuple):
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
    def is_rounded(self) -> bool:
        """Return whether an array is in fewer bits than in memory."""
        return any(array.is_rounded for array in self.arrays)


@dataclass
class SegmentLayout:
    """The position of everything in a segment; created before anything is captured.

    Attributes:
        offsets: file offset in bytes of each stored array, by (table index, array name).
        block_bytes: arrays and chunks begin at a multiple of it: ``ALIGNMENT``, or
            ``SMALL_BLOCK`` in a segment of small arrays.
        header_bytes: size of the header, a whole number of blocks.
        file_bytes: size of the whole file, a whole number of blocks.
    """

    tables: tuple[TableSpec, ...]
    metadata: dict[str, Any]
    block_bytes: int
    header_bytes: int = 0
    file_bytes: int = 0
    offsets: dict[tuple[int, str], int] = field(default_factory=dict)

    def place_at(self, start: int) -> None:
        """Fix every offset, the first array at ``start``."""
        offset = start
        for index, table in enumerate(self.tables):
            for array in self.stored(table):
                self.offsets[index, array.name] = offset
                offset += self._align(table.num_rows * array.file_row_bytes)
        self.file_bytes = offset

    def _align(self, size_bytes: int) -> int:
        return align_up(size_bytes, self.block_bytes)

    @staticmethod
    def stored(table: TableSpec) -> tuple[ArraySpec, ...]:
        """Return the arrays of a table in the order of the file: row ids first, if stored."""
        if table.range_begin is not None:
            return table.arrays
        return (_ROW_IDS, *table.arrays)

    def rows_bytes(self, index: int, count: int) -> int:
        """Return the slot bytes of ``count`` rows of table ``index``, captured as one chunk."""
        return sum(
            align_up(count * array.file_row_bytes) for array in self.stored(self.tables[index])
        )

    def offset(self, index: int, array: str) -> int:
        """Return file offset of an array of table ``index``; 0 while nothing is placed."""
        return self.offsets.get((index, array), 0)


def with_checksum(header: bytes, checksum: str, *, of: str) -> bytes:
    """Return a header block with another value in the place of its own checksum ``of``."""
    # The first of its kind: names that come from users follow later.
    old, new = (f'"header_crc32c":"{text}"'.encode() for text in (of, checksum))
    return header.replace(old, new, 1)


class Described(NamedTuple):
    """What the header of a new segment says of a table, as far as its rows do not change it.

    Attributes:
        specs: its arrays.
        name: a JSON text.
        arrays: what rows are made of, a JSON text.
        stored: of ``row_ids`` and each array its name in the file, as a JSON text, its dtype there
            and the shape of a row (``,2,3``).
    """

    specs: tuple[ArraySpec, ...]
    name: str
    arrays: str
    stored: list[tuple[str, str, str]]


def described(
    table: str,
    arrays: Mapping[str, torch.Tensor],
    precision_of: Callable[[str], str] = lambda name: EXACT,
) -> Described:
    """Describe a table's tensors (num_rows, ...).

    Args:
        precision_of: precision of an array of float32 rows, by its name.

    Raises:
        UsageError: a dtype that safetensors cannot hold.
    """
    forms = ((name, t.dtype, t.shape[1:], precision_of(name)) for name, t in arrays.items())
    return _described(table, *forms)


@lru_cache(maxsize=1 << 14)  # of thousands of tables, this is much of a small snapshot's time
def _described(table: str, *forms: tuple[str, torch.dtype, torch.Size, str]) -> Described:
    specs = []
    for name, dtype, row_shape, precision in forms:
        if dtype not in DTYPE_NAMES:
            place = f"{table}/{name}" if name else table
            raise UsageError(f"'{place}' has dtype {dtype}; can be stored: {list_dtypes()}")
        kept_as = EXACT
        if dtype == torch.float32:
            kept_as = precision_of_row(math.prod(row_shape), precision)
        specs.append(ArraySpec(name, dtype, tuple(row_shape), kept_as))
    texts = [
        [each.name, DTYPE_NAMES[each.dtype], each.row_shape, *[each.precision] * each.is_rounded]
        for each in specs
    ]
    stored = []
    for array in (_ROW_IDS, *specs):
        in_file, shape = array.in_file()
        name = f"{table}/{array.name}" if array.name else table
        stored.append((json.dumps(name), in_file, "".join(f",{size}" for size in shape)))
    listed = json.dumps(texts, separators=(",", ":"))
    return Described(tuple(specs), json.dumps(table), listed, stored)


def native_table(
    layout: SegmentLayout,
    index: int,
    arrays: Mapping[str, torch.Tensor],
    *,
    first_row_id: int = 0,
    is_on_host: bool = False,
) -> native.SegmentTable:
    """Table ``index`` of a layout, joined with the tensors (num_rows, ...) a restore writes.

    The first row of ``arrays`` is row ``first_row_id`` of the table. ``is_on_host``: no device has
    any of them.
    """
    spec = layout.tables[index]
    table = native.SegmentTable(name=spec.name, num_rows=0)
    for array in spec.arrays:
        tensor = arrays[array.name]
        table.add_rows(
            array.name,
            tensor,
            0,
            first_row_id=first_row_id,
            stager=None if is_on_host else stager_of(tensor),
            precision=array.precision,
        )
    return table_in_file(layout, index, table)


def table_in_file(
    layout: SegmentLayout, index: int, like: native.SegmentTable
) -> native.SegmentTable:
    """Return table ``index`` of a layout, with the arrays of another native one of its kind."""
    spec = layout.tables[index]
    table = like.in_file(spec.num_rows, spec.range_begin, layout.block_bytes)
    ids_offset = -1 if spec.range_begin is not None else layout.offset(index, ROW_IDS)
    table.place(ids_offset, [layout.offset(index, array.name) for array in spec.arrays])
    return table


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
    def is_rounded(self) -> bool:
        """Return whether some of its rows are in fewer bits than in memory."""
        return any(table.is_rounded for table in self.layout.tables)
