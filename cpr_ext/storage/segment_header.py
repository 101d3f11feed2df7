"""Read a segment's header. It may be untrusted: it is checked against the file.

After :func:`read_segment`, reading the segment takes no more memory than the file has bytes, and no
more time than to read it once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from cpr_ext._native import native
from cpr_ext.errors import DamageError, StoreError
from cpr_ext.state.dense_schema import MAX_DIMENSIONS, MAX_NAME
from cpr_ext.state.dtypes import DTYPES
from cpr_ext.state.position import is_count
from cpr_ext.state.precision import EXACT, PRECISIONS
from cpr_ext.storage.file_names import Kind
from cpr_ext.storage.filesystem import open_regular, require_all_bytes
from cpr_ext.storage.manifest import MAX_SEGMENT_BYTES, Manifest, Records, SegmentRecord
from cpr_ext.storage.retries import retrying
from cpr_ext.storage.segment_format import (
    ALIGNMENT,
    FORMAT_VERSION,
    MAX_HEADER_BYTES,
    NO_CHECKSUM,
    ROW_IDS,
    SMALL_BLOCK,
    ArraySpec,
    Chunk,
    Segment,
    SegmentLayout,
    TableSpec,
    with_checksum,
)


def read_segment(path: Path, record: SegmentRecord) -> Segment:
    """Read and check a segment's header; the rows are checked when they are read.

    Args:
        record: what the manifest says of it.

    Raises:
        DamageError: the file is missing or no regular file, ends early, or its header is not what
            was committed, or describes what cannot be.
        StorageError: it could not be read; see :mod:`cpr_ext.storage.retries`.
        StoreError: it has a format version not known here.
    """
    header_bytes = record.header_bytes
    if not 8 <= header_bytes <= MAX_HEADER_BYTES:
        raise DamageError(f"{path}: the manifest gives a header of {header_bytes} bytes")
    try:
        file_bytes, block = retrying(path, lambda: _read_block(path, header_bytes))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamageError(f"{path}: {error.strerror or error}") from error
    if len(block) != header_bytes:
        raise DamageError(f"{path}: the file ends inside its header ({len(block)} bytes)")
    if (actual := native.crc32c(block)) != record.header_crc32c:
        raise DamageError(
            f"{path}: header checksum {actual:08x}, the manifest recorded "
            f"{record.header_crc32c:08x}"
        )
    segment = _parsed(path, block, file_bytes)
    if file_bytes != record.file_bytes:
        raise DamageError(f"{path}: {file_bytes} bytes, the manifest recorded {record.file_bytes}")
    said, expected = _identity(segment.metadata), _identity(vars(record))
    is_dense = record.kind == "dense"
    if said != expected or any((t.shape is not None) != is_dense for t in segment.layout.tables):
        raise DamageError(
            f"{path}: it says it is {said} (kind, snapshot, its id); its place is that of "
            f"{expected}"
        )
    return segment


def _identity(values: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(values.get(name) for name in ("kind", "snapshot", "id"))


def _parsed(path: Path, block: bytes, file_bytes: int) -> Segment:
    """Return the segment that a header describes; raises DamageError for all but one."""
    try:
        return _parse(path, block, file_bytes)
    except StoreError:
        raise
    except Exception as error:  # of whatever a header may hold
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
    metadata: Mapping[str, Any],
    file_bytes: int,
    header: bytes,
    *,
    steps: tuple[int, int],
    num_samples: int,
    is_complete: bool = False,
) -> SegmentRecord:
    """Return what a manifest is to say of a segment with this header block.

    Args:
        steps: the first and the last one at which rows were captured.
    """
    return SegmentRecord(
        *_identity_of(metadata),
        first_step=steps[0],
        last_step=steps[1],
        num_samples=num_samples,
        file_bytes=file_bytes,
        header_bytes=len(header),
        header_crc32c=native.crc32c(header),
        is_complete=is_complete,
    )


def _identity_of(metadata: Mapping[str, Any]) -> tuple[Kind, int, str]:
    return metadata["kind"], metadata["snapshot"], metadata["id"]


def point_metadata(
    manifest: Manifest,
    rows: Records,
    *,
    steps: tuple[int, int],
    num_samples: int,
    is_complete: bool,
) -> dict[str, Any]:
    """Return what the header of a dense part says, so that :func:`read_point` can read it.

    Args:
        manifest: of the store.
        rows: the segments of rows that make the state at this snapshot.
    """
    return {
        "point": {"steps": steps, "num_samples": num_samples, "is_complete": is_complete},
        "store_id": manifest.store_id,
        "follows": manifest.commit_id,
        "model": json.loads(manifest.model.text),
        "rows": [json.loads(record.text) for record in rows],
    }


def read_point(path: Path) -> tuple[Manifest, str]:
    """Return the manifest of a store that holds one snapshot, from its dense part's own header.

    The segments that it names are not looked at. The second value is the commit that it follows.

    Raises:
        DamageError: the header is not what was written, or does not make a store.
        StorageError: it could not be read.
    """
    header_bytes = retrying(path, lambda: _own_header_bytes(path))
    if header_bytes % SMALL_BLOCK != 0 or header_bytes > MAX_HEADER_BYTES:
        raise DamageError(f"{path}: not a segment")
    file_bytes, block = retrying(path, lambda: _read_block(path, header_bytes))
    metadata = _parsed(path, block, file_bytes).metadata
    try:
        own = json.loads(block[8:])["__metadata__"]["header_crc32c"]
        if f"{native.crc32c(with_checksum(block, NO_CHECKSUM, of=own)):08x}" != own:
            raise ValueError("its header's checksum differs from the header")
        first_step, last_step = metadata["point"]["steps"]
        record = record_of(
            metadata,
            file_bytes,
            block,
            steps=(first_step, last_step),
            num_samples=metadata["point"]["num_samples"],
            is_complete=metadata["point"]["is_complete"],
        )
        content = {
            "store_id": metadata["store_id"],
            "model": metadata["model"],
            "commit_id": record.id,
            "ancestors": "",
            "dense": [json.loads(record.text)],
            "rows": metadata["rows"],
        }
    except Exception as error:  # of whatever a header may hold
        raise DamageError(
            f"{path}: its header does not show what it is ({error!r:.200})"
        ) from error
    return Manifest.from_content(content, str(path)), str(metadata.get("follows"))


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
    kinds = [_same(_arrays(arrays)) for arrays in own.pop("arrays")]
    tables = tuple(_table(table, kinds[_count(table["arrays"])]) for table in described)
    _require(len({table.name for table in tables}) == len(tables), "a table appears twice")
    chunks = _chunks(own.pop("chunks"))
    block_bytes = _count(own.pop("block_bytes"))
    _require(block_bytes in (ALIGNMENT, SMALL_BLOCK), f"blocks of {block_bytes!r:.100} bytes")
    _require(len(block) % block_bytes == 0, f"a header of {len(block)} bytes")
    layout = SegmentLayout(tables, own, block_bytes, header_bytes=len(block))
    layout.place_at(start=len(block))
    if layout.file_bytes != file_bytes or file_bytes > MAX_SEGMENT_BYTES:
        raise ValueError(f"{file_bytes} bytes; its header describes {layout.file_bytes}")
    _check_chunks(layout, chunks)
    return Segment(path, layout, chunks)


@lru_cache(maxsize=1024)
def _same(arrays: tuple[ArraySpec, ...]) -> tuple[ArraySpec, ...]:
    """Return one object for all equal ones: they are compared for each table of each segment."""
    return arrays


def _arrays(described: Sequence[Any]) -> tuple[ArraySpec, ...]:
    arrays = tuple(
        ArraySpec(_name(name), DTYPES[dtype], _shape(row_shape), *precision)
        for name, dtype, row_shape, *precision in described
    )
    for array in arrays:
        _require(array.precision in PRECISIONS, f"precision {array.precision!r:.100}")
        is_float = array.dtype == DTYPES["F32"]
        _require(is_float or array.precision == EXACT, "rounded values that are not float32")
    names = {array.name for array in arrays}
    _require(len(names) == len(arrays) and ROW_IDS not in names, "an array appears twice")
    # Rows without bytes would be as many as one likes in a file of any size.
    _require(bool(names) and all(array.file_row_bytes for array in arrays), "rows have no bytes")
    return arrays


def _table(table: dict[str, Any], arrays: tuple[ArraySpec, ...]) -> TableSpec:
    spec = TableSpec(
        name=_name(table["name"]),
        num_rows=_count(table["num_rows"]),
        range_begin=_count(table["range_begin"]) if "range_begin" in table else None,
        shape=_shape(table["shape"]) if "shape" in table else None,
        arrays=arrays,
    )
    if spec.shape is not None:
        flat = [(a.name, a.row_shape, a.precision) for a in arrays] == [("", (), EXACT)]
        is_flat = spec.range_begin == 0 and flat
        _require(is_flat and math.prod(spec.shape) == spec.num_rows, "a tensor has another shape")
    return spec


def _chunks(described: Sequence[Any]) -> list[Chunk]:
    chunks = []
    for table, first, count, step, crcs in described:
        numbers = [int(crc, 16) for crc in crcs]
        _require(not numbers or 0 <= min(numbers) <= max(numbers) < 2**32, "no checksum")
        _require(is_count(step), f"step {step!r:.100}")
        chunks.append(Chunk(_count(table), _count(first), _count(count), step, numbers))
    return chunks


def _check_chunks(layout: SegmentLayout, chunks: Sequence[Chunk]) -> None:
    """They cover every row once, in order, and each piece starts on a block."""
    next_row = [0] * len(layout.tables)
    for table, first, count, _, crcs in chunks:
        _require(first == next_row[table] and count >= 1, "its chunks do not follow one another")
        next_row[table] += count
        stored = layout.stored(layout.tables[table])
        in_place = first == 0 or not any(
            first * array.file_row_bytes % layout.block_bytes for array in stored
        )
        _require(
            in_place and len(crcs) == len(stored),
            f"a chunk of '{layout.tables[table].name}' is misplaced",
        )
    for spec, rows in zip(layout.tables, next_row, strict=True):
        _require(
            rows == spec.num_rows, f"{rows} of {spec.num_rows} rows of '{spec.name}' in chunks"
        )


def _shape(sizes: Sequence[Any]) -> tuple[int, ...]:
    _require(len(sizes) <= MAX_DIMENSIONS, f"{len(sizes)} dimensions")
    return tuple(_count(size) for size in sizes)


def _name(value: Any) -> str:
    _require(isinstance(value, str) and len(value) <= MAX_NAME, f"{value!r:.100} is no name")
    value.encode()  # ValueError: half a character
    return str(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.100} is not a count")
    return value


def _require(is_good: bool, otherwise: str) -> None:
    if not is_good:
        raise ValueError(otherwise)
