"""The segment file: a valid safetensors file laid out for direct I/O.

``docs/snapshot_format.md`` is the specification; this file mirrors it. Offsets are known before the
first row is captured, so rows are written in place and in any order. The header, which holds the
checksums, is written last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cpr_ext._native import native
from cpr_ext.cuda import stager_of
from cpr_ext.errors import UsageError
from cpr_ext.state.dtypes import DTYPE_NAMES, list_dtypes

ALIGNMENT: int = native.ALIGNMENT
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


def align_up(size_bytes: int) -> int:
    """Round up to a whole number of blocks."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ArraySpec:
    """One array of a table in a segment: its name, dtype, and the shape of a single row."""

    name: str
    dtype: torch.dtype
    row_shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return self.dtype.itemsize * math.prod(self.row_shape)

    @property
    def file_row_bytes(self) -> int:
        """Bytes of one row in the file."""
        return self.row_bytes


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


@dataclass(frozen=True)
class Committed:
    """What a manifest is to say of a segment, kept in its header too: it can then be rebuilt."""

    first_step: int = _WIDEST_STEP
    last_step: int = _WIDEST_STEP
    num_samples: int = _WIDEST_STEP
    is_complete: bool = False


@dataclass
class SegmentLayout:
    """The position of everything in a segment; created before anything is captured.

    Attributes:
        offsets: file offset in bytes of each stored array, by (table index, array name).
        header_bytes: size of the header block, a multiple of ``ALIGNMENT``.
        file_bytes: size of the whole file, a multiple of ``ALIGNMENT``.
    """

    tables: tuple[TableSpec, ...]
    metadata: dict[str, Any]
    header_bytes: int = 0
    file_bytes: int = 0
    offsets: dict[tuple[int, str], int] = field(default_factory=dict)

    def place(self, rows_per_chunk: list[int]) -> None:
        """Fix every offset, for tables captured ``rows_per_chunk`` rows at a time."""
        widest: list[Chunk] = [
            Chunk(index, first, min(step, table.num_rows - first), _WIDEST_STEP, widest_checksums)
            for index, (table, step) in enumerate(zip(self.tables, rows_per_chunk, strict=True))
            for widest_checksums in [[_WIDEST_CHECKSUM] * len(self.stored(table))]
            for first in range(0, table.num_rows, step)
        ]
        self.place_at(start=0)
        self.header_bytes = align_up(8 + len(self._header_json(widest, Committed())))
        if self.header_bytes > MAX_HEADER_BYTES:
            raise UsageError(
                f"the segment's header would take {self.header_bytes} bytes of {MAX_HEADER_BYTES}; "
                "make slot_bytes larger, or give large extra state as tensors"
            )
        self.place_at(start=self.header_bytes)

    def place_at(self, start: int) -> None:
        """Fix every offset, the first array at ``start``."""
        offset = start
        for index, table in enumerate(self.tables):
            for array in self.stored(table):
                self.offsets[index, array.name] = offset
                offset += align_up(table.num_rows * array.file_row_bytes)
        self.file_bytes = offset

    @staticmethod
    def stored(table: TableSpec) -> tuple[ArraySpec, ...]:
        """Return the arrays of a table in the order of the file: row ids first, if stored."""
        if table.range_begin is not None:
            return table.arrays
        return (ArraySpec(ROW_IDS, torch.int64, ()), *table.arrays)

    def rows_bytes(self, index: int, count: int) -> int:
        """Return the file bytes of ``count`` rows of table ``index``, captured as one chunk."""
        return sum(
            align_up(count * array.file_row_bytes) for array in self.stored(self.tables[index])
        )

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
                end = begin + table.num_rows * array.file_row_bytes
                name = f"{table.name}/{array.name}" if array.name else table.name
                shape = (table.num_rows, *array.row_shape) if table.shape is None else table.shape
                entries[name] = {
                    "dtype": DTYPE_NAMES[array.dtype],
                    "shape": shape,
                    "data_offsets": [begin, end],
                }
                # safetensors allows no holes: what aligns the next array is a tensor, too.
                if pad := align_up(end) - end:
                    entries[f"__pad.{pads}"] = {
                        "dtype": "U8",
                        "shape": [pad],
                        "data_offsets": [end, end + pad],
                    }
                    pads += 1
        own = {
            **self.metadata,
            "tables": [
                {
                    "name": table.name,
                    "num_rows": table.num_rows,
                    "range_begin": table.range_begin,
                    "shape": table.shape,
                    "arrays": [
                        [array.name, DTYPE_NAMES[array.dtype], list(array.row_shape)]
                        for array in table.arrays
                    ],
                }
                for table in self.tables
            ],
            "chunks": [[*chunk[:4], [f"{crc:08x}" for crc in chunk.checksums]] for chunk in chunks],
        }
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


def with_checksum(header: bytes, checksum: str, *, of: str) -> bytes:
    """Return a header block with another value in the place of its own checksum ``of``."""
    # The first of its kind: names that come from users follow later.
    old, new = (f'"header_crc32c":"{text}"'.encode() for text in (of, checksum))
    return header.replace(old, new, 1)


def array_specs(table: str, arrays: Mapping[str, torch.Tensor]) -> tuple[ArraySpec, ...]:
    """Return what a segment notes of a table's tensors (num_rows, ...).

    Raises:
        UsageError: a dtype that safetensors cannot hold.
    """
    for name, tensor in arrays.items():
        if tensor.dtype not in DTYPE_NAMES:
            place = f"{table}/{name}" if name else table
            raise UsageError(f"'{place}' has dtype {tensor.dtype}; can be stored: {list_dtypes()}")
    return tuple(
        ArraySpec(name, tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in arrays.items()
    )


def native_table(
    layout: SegmentLayout,
    index: int,
    arrays: Mapping[str, torch.Tensor],
    row_ids: np.ndarray[Any, np.dtype[np.int64]] | None = None,
    *,
    is_packed: bool = False,
    first_row_id: int = 0,
) -> Any:
    """Table ``index`` of a layout, joined with the tensors (num_rows, ...) its arrays come from.

    ``arrays`` may be those a capture reads or those a restore writes; ``row_ids`` is given for a
    capture of selected rows. If ``is_packed``, these rows alone are in ``arrays``. The first row of
    ``arrays`` is row ``first_row_id`` of the table.
    """
    spec = layout.tables[index]
    table = native.SegmentTable(
        name=spec.name,
        num_rows=spec.num_rows,
        row_ids_offset=-1 if spec.range_begin is not None else layout.offset(index, ROW_IDS),
        range_begin=spec.range_begin or 0,
        row_ids=row_ids,
        is_packed=is_packed,
    )
    for array in spec.arrays:
        tensor = arrays[array.name]
        offset = layout.offset(index, array.name)
        stager = stager_of(tensor)
        table.add_rows(array.name, tensor, offset, first_row_id=first_row_id, stager=stager)
    return table


def place_native(layout: SegmentLayout, index: int, table: Any) -> None:
    """Set where in the file a native table has its rows, of a layout that was placed since."""
    spec = layout.tables[index]
    ids_offset = -1 if spec.range_begin is not None else layout.offset(index, ROW_IDS)
    table.place(ids_offset, [layout.offset(index, array.name) for array in spec.arrays])


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
