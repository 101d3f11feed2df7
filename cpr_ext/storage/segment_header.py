"""Read a segment's header. It may be untrusted: it is checked against the file.

After :func:`read_segment`, reading the segment takes no more memory than the file has bytes, and no
more time than to read it once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpr_ext._native import native
from cpr_ext.errors import DamageError, StoreError
from cpr_ext.state.dtypes import DTYPES
from cpr_ext.state.position import is_count
from cpr_ext.state.precision import EXACT, PRECISIONS
from cpr_ext.storage.file_names import parse_segment_name
from cpr_ext.storage.filesystem import open_regular, require_all_bytes
from cpr_ext.storage.lineage import chain_after
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.retries import retrying, retrying_segment
from cpr_ext.storage.rounded_chunks import IdRun, Rounding, are_runs
from cpr_ext.storage.segment_format import (
    ALIGNMENT,
    FORMAT_VERSION,
    MAX_HEADER_BYTES,
    NO_CHECKSUM,
    ROW_IDS,
    SMALL_BLOCK,
    ArraySpec,
    Chunk,
    Committed,
    Segment,
    SegmentLayout,
    TableSpec,
    with_checksum,
)

MAX_SEGMENT_BYTES = 1 << 50  # as in csrc/pipeline/segment_plan.h
_MAX_DIMENSIONS = 32
_MAX_NAME = 4096
_MALFORMED = (
    *(KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError),
    RecursionError,
)


def read_segment(path: Path, *, header_bytes: int, header_crc32c: int) -> Segment:
    """Read and check a segment's header; the rows are checked when they are read.

    Args:
        path: the segment file.
        header_bytes: size of the header block, from the manifest.
        header_crc32c: its checksum, from the manifest.

    Raises:
        DamageError: the file is missing or no regular file, ends early, or its header is not what
            was committed, or describes what cannot be.
        StorageError: it could not be read; see :mod:`cpr_ext.storage.retries`.
        StoreError: it has a format version not known here.
    """
    if not 8 <= header_bytes <= MAX_HEADER_BYTES:
        raise DamageError(f"{path}: the manifest gives a header of {header_bytes} bytes")
    try:
        file_bytes, block = retrying_segment(path, lambda: _read_block(path, header_bytes))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamageError(f"{path}: {error.strerror or error}") from error
    if len(block) != header_bytes:
        raise DamageError(f"{path}: the file ends inside its header ({len(block)} bytes)")
    if (actual := native.crc32c(block)) != header_crc32c:
        raise DamageError(
            f"{path}: header checksum {actual:08x}, the manifest recorded {header_crc32c:08x}"
        )
    try:
        return _parse(path, block, file_bytes)
    except _MALFORMED as error:
        raise DamageError(f"{path}: not a cpr_ext segment ({error!r:.200})") from error


def _read_block(path: Path, header_bytes: int) -> tuple[int, bytes]:
    """Read the size of a segment file and its header block, as far as the file reaches."""
    with os.fdopen(open_regular(path), "rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        wanted = min(header_bytes, file_bytes)
        block = file.read(wanted)
        require_all_bytes(file.fileno(), len(block), wanted)
    return file_bytes, block


def record_of(
    path: Path, metadata: Mapping[str, Any], file_bytes: int, header: bytes, committed: Committed
) -> SegmentRecord:
    """Return what a manifest is to say of a segment with this header block."""
    before = committed.chain_before
    return SegmentRecord(
        file=path.name,
        kind=metadata["kind"],
        snapshot=metadata["snapshot"],
        first_step=committed.first_step,
        last_step=committed.last_step,
        num_samples=committed.num_samples,
        file_bytes=file_bytes,
        header_bytes=len(header),
        header_crc32c=native.crc32c(header),
        is_complete=committed.is_complete,
        chain_before=before,
        chain=committed.merged_chain or chain_after(before, path.name, header),
        shards=tuple(metadata.get("shards", ())),
    )


def read_own_record(path: Path) -> SegmentRecord:
    """Return what a manifest would say of a segment, from the segment's own header.

    Raises:
        DamageError: the file is not what was written.
        StorageError: it could not be read.
    """
    name = parse_segment_name(path.name)
    header_bytes = retrying(path, lambda: _own_header_bytes(path))
    if name is None or header_bytes % SMALL_BLOCK != 0 or header_bytes > MAX_HEADER_BYTES:
        raise DamageError(f"{path}: not a segment")
    file_bytes, block = retrying(path, lambda: _read_block(path, header_bytes))
    try:
        metadata = json.loads(block[8:])["__metadata__"]
        own, committed = metadata["header_crc32c"], json.loads(metadata["committed"])
        unsigned = with_checksum(block, NO_CHECKSUM, of=own)
        if f"{native.crc32c(unsigned):08x}" != own:
            raise ValueError("its header's checksum differs from the header")
        segment = _parse(path, block, file_bytes)
        said = segment.metadata["snapshot"], segment.metadata["kind"]
        _require(said == name, "it is another segment")
        return record_of(path, segment.metadata, file_bytes, block, Committed(**committed))
    except _MALFORMED as error:
        raise DamageError(
            f"{path}: its header does not show what it is ({error!r:.200})"
        ) from error


def _own_header_bytes(path: Path) -> int:
    with os.fdopen(open_regular(path), "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _parse(path: Path, block: bytes, file_bytes: int) -> Segment:
    metadata = json.loads(block[8:])["__metadata__"]
    version = int(metadata["format_version"])
    if metadata["format"] != "cpr_ext.segment":
        raise ValueError(f"format {metadata['format']!r}")
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{path}: segment format version {version}; this release reads {FORMAT_VERSION}. "
            "Use the release that wrote the store, or a newer one"
        )
    own = json.loads(metadata["cpr_ext"])
    described = own.pop("tables")
    kinds = [_arrays(arrays) for arrays in own.pop("arrays")]
    tables = tuple(_table(table, kinds[_count(table["arrays"])]) for table in described)
    _require(len({table.name for table in tables}) == len(tables), "a table appears twice")
    chunks = [_chunk(chunk) for chunk in own.pop("chunks")]
    rounding = _rounding(own.pop("rounding", []))
    _check_noted(own)
    block_bytes = _count(own.pop("block_bytes"))
    _require(block_bytes in (ALIGNMENT, SMALL_BLOCK), f"blocks of {block_bytes!r:.100} bytes")
    _require(len(block) % block_bytes == 0, f"a header of {len(block)} bytes")
    id_runs = _id_runs(described)
    layout = SegmentLayout(tables, own, block_bytes, header_bytes=len(block), id_runs=id_runs)
    _check_rounded(layout, chunks, rounding)
    layout.place_at(start=len(block))
    layout.note_rounding(chunks, rounding)
    if layout.file_bytes != file_bytes or file_bytes > MAX_SEGMENT_BYTES:
        raise ValueError(f"{file_bytes} bytes; its header describes {layout.file_bytes}")
    _check_chunks(layout, chunks)
    return Segment(path, layout, chunks)


def _arrays(described: Sequence[Any]) -> tuple[ArraySpec, ...]:
    return tuple(
        ArraySpec(_name(name), DTYPES[dtype], _shape(row_shape), *precision)
        for name, dtype, row_shape, *precision in described
    )


def _table(table: dict[str, Any], arrays: tuple[ArraySpec, ...]) -> TableSpec:
    spec = TableSpec(
        name=_name(table["name"]),
        num_rows=_count(table["num_rows"]),
        range_begin=_count(table["range_begin"]) if "range_begin" in table else None,
        shape=_shape(table["shape"]) if "shape" in table else None,
        arrays=arrays,
    )
    for array in spec.arrays:
        _require(array.precision in PRECISIONS, f"precision {array.precision!r:.100}")
        is_float = array.dtype == DTYPES["F32"] and spec.shape is None
        _require(is_float or array.precision == EXACT, "rounded values that are not float32")
    names = {array.name for array in spec.arrays}
    _require(len(names) == len(spec.arrays) and ROW_IDS not in names, "an array appears twice")
    # Rows without bytes would be as many as one likes in a file of any size.
    _require(
        bool(names) and all(array.file_row_bytes for array in spec.arrays), "rows have no bytes"
    )
    if spec.shape is not None:
        is_flat = spec.range_begin == 0 and [(a.name, a.row_shape) for a in spec.arrays] == [
            ("", ())
        ]
        _require(is_flat and math.prod(spec.shape) == spec.num_rows, "a tensor has another shape")
    return spec


def _chunk(chunk: Sequence[Any]) -> Chunk:
    table, first, count, step, crcs = chunk
    numbers = [int(crc, 16) for crc in crcs]
    _require(all(0 <= number < 2**32 for number in numbers), "a checksum is no checksum")
    _require(is_count(step), f"step {step!r:.100}")
    return Chunk(_count(table), _count(first), _count(count), step, numbers)


def _id_runs(described: Sequence[dict[str, Any]]) -> dict[int, list[IdRun]]:
    return {
        index: [IdRun(*map(_count, run)) for run in table["row_id_runs"]]
        for index, table in enumerate(described)
        if "row_id_runs" in table
    }


def _rounding(entries: Sequence[Any]) -> dict[tuple[int, int], Rounding]:
    found = {}
    for table, first, num_exact, error in entries:
        _require(isinstance(error, float) and 0 <= error < math.inf, f"error {error!r:.100}")
        found[_count(table), _count(first)] = Rounding(_count(num_exact), error)
    return found


def _check_noted(own: dict[str, Any]) -> None:
    if "rounded" in own:
        num_rows, error = own["rounded"]
        _count(num_rows)
        _require(isinstance(error, float) and 0 <= error < math.inf, f"error {error!r:.100}")


def _check_rounded(
    layout: SegmentLayout, chunks: Sequence[Chunk], rounding: dict[tuple[int, int], Rounding]
) -> None:
    """Packed row ids are of the chunks and ascend; each chunk of rounded rows is described."""
    for index, runs in layout.id_runs.items():
        counts = [chunk.num_rows for chunk in chunks if chunk.table == index]
        spec = layout.tables[index]
        good = spec.range_begin is None and [run.num_ids for run in runs] == counts
        _require(good and are_runs(runs), f"the row ids of '{spec.name}'")
    expected = {}
    if layout.is_rounded:
        expected = {c[:2]: c.num_rows for c in chunks if layout.tables[c.table].exact_row_bytes}
    _require(expected.keys() == rounding.keys(), "its rounded chunks")
    for at, num_rows in expected.items():
        _require(rounding[at].num_exact <= num_rows, "more exact rows than rows")


def _check_chunks(layout: SegmentLayout, chunks: Sequence[Chunk]) -> None:
    """They cover every row once, in order, and each piece starts on a block."""
    next_row = [0] * len(layout.tables)
    for table, first, count, _, crcs in chunks:
        _require(first == next_row[table] and count >= 1, "its chunks do not follow one another")
        next_row[table] += count
        stored = layout.stored(layout.tables[table])
        placed = layout.tables[table].arrays if table in layout.id_runs else stored
        _require(
            len(crcs) == len(stored) + ((table, first) in layout.exact_offsets)
            and not any(first * array.file_row_bytes % layout.block_bytes for array in placed),
            f"a chunk of '{layout.tables[table].name}' is misplaced",
        )
    for spec, rows in zip(layout.tables, next_row, strict=True):
        _require(
            rows == spec.num_rows, f"{rows} of {spec.num_rows} rows of '{spec.name}' in chunks"
        )


def _shape(sizes: Sequence[Any]) -> tuple[int, ...]:
    _require(len(sizes) <= _MAX_DIMENSIONS, f"{len(sizes)} dimensions")
    return tuple(_count(size) for size in sizes)


def _name(value: Any) -> str:
    _require(isinstance(value, str) and len(value) <= _MAX_NAME, f"{value!r:.100} is no name")
    value.encode()  # ValueError: half a character
    return str(value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.100} is not a count")
    return value


def _require(is_good: bool, otherwise: str) -> None:
    if not is_good:
        raise ValueError(otherwise)
