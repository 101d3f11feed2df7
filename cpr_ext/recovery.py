"""Bring rows back: a manifest's segments, oldest first, each verified and laid over the last.

The newest undamaged state of each row wins, so a damaged chunk leaves the row's older state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.aftermath import Source, account, needs_account
from cpr_ext.dense import DensePart
from cpr_ext.dense_tree import read_position
from cpr_ext.errors import DamageError, StoreError
from cpr_ext.manifest import Manifest, SegmentRecord
from cpr_ext.recovery_report import DamagedSegment, RecoveryReport
from cpr_ext.segment import ALIGNMENT, ArraySpec, Segment, native_table
from cpr_ext.segment_rows import SegmentRows
from cpr_ext.store_reader import open_segment
from cpr_ext.tables import Table, shard_row_range

# Per-row optimizer state takes at most so many times the bytes of the weight, unless a base has it.
_SMALL_STATES = 16


def restore_shard(
    manifest: Manifest,
    shard: int,
    num_shards: int,
    tables: Mapping[str, Table],
    pool: Any,
    report: RecoveryReport,
    *,
    direct_io: bool = True,
) -> dict[str, set[str]]:
    """Restore every row of ``shard`` from the live segments of its manifest, and nothing else.

    Args:
        tables: the live tables by name; rows of other shards are not touched.
        report: counts are added to it, and which rows are older or missing because of damage.

    Returns:
        The names of the arrays restored, by table.

    Raises:
        StoreError: a segment does not fit the live tables; nothing was restored.
    """
    ranges = {
        name: shard_row_range(table.num_embeddings, shard, num_shards)
        for name, table in tables.items()
    }
    sources = [_open(manifest, record, ranges, report, direct_io) for record in manifest.segments]
    usable = [source.rows for source in sources if source.rows is not None]
    make_missing_states([rows.segment for rows in usable], tables)
    for source in sources:
        if source.rows is not None:
            segment = source.rows.segment
            source.damaged |= _restore_segment(segment, tables, ranges, pool, report, direct_io)
    missing_before = report.rows_missing
    if needs_account(sources):
        account(ranges, sources, report)
    num_rows = sum(end - begin for begin, end in ranges.values())
    report.rows_restored += num_rows - (report.rows_missing - missing_before)
    restored: dict[str, set[str]] = {}
    for rows in usable:
        for spec in rows.segment.layout.tables:
            restored.setdefault(spec.name, set()).update(array.name for array in spec.arrays)
    return restored


def _open(
    manifest: Manifest,
    record: SegmentRecord,
    ranges: Mapping[str, tuple[int, int]],
    report: RecoveryReport,
    direct_io: bool,
) -> Source:
    try:
        segment = open_segment(manifest, record)
        return Source(record, SegmentRows(segment, dict(ranges), direct_io=direct_io))
    except DamageError as error:
        path = manifest.path_of(record)
        report.damaged_segments.append(DamagedSegment(path, str(error), -1))
        return Source(record, None)


def make_missing_states(segments: Sequence[Segment], tables: Mapping[str, Table]) -> None:
    """Make per-row states that the segments hold and the live tables do not have yet, all zero.

    Raises:
        StoreError: an array has another dtype or row shape than that of the live table, or a state
            is larger than the segments justify; nothing was made.
    """
    needed: dict[tuple[str, str], ArraySpec] = {}
    for segment in segments:
        for spec in segment.layout.tables:
            table = tables[spec.name]
            arrays = table.arrays()
            for array in spec.arrays:
                live = arrays.get(array.name)
                known = needed.setdefault((spec.name, array.name), array)
                wanted = (
                    (known.dtype, known.row_shape)
                    if live is None
                    else (live.dtype, tuple(live.shape[1:]))
                )
                if wanted != (array.dtype, array.row_shape):
                    raise StoreError(
                        f"{segment.path}: '{spec.name}/{array.name}' has dtype {array.dtype} and "
                        f"rows of shape {array.row_shape}; the model has {wanted[0]} and "
                        f"{wanted[1]}"
                    )
                if live is not None:
                    del needed[spec.name, array.name]
                elif not (_holds_base(segment) or _is_small(array, table)):
                    raise StoreError(
                        f"{segment.path}: '{spec.name}/{array.name}' has rows of "
                        f"{array.row_bytes} bytes, and no base segment holds it for all rows"
                    )
    for (name, _), array in needed.items():
        tables[name].make_row_state(array.name, array.row_shape, array.dtype)


def _holds_base(segment: Segment) -> bool:
    return bool(segment.metadata["kind"] == "base")


def _is_small(array: ArraySpec, table: Table) -> bool:
    """A state that a segment of a few rows may make the optimizer have for all rows."""
    row_bytes: int = table.embedding_dim * table.weight.dtype.itemsize
    return array.row_bytes <= _SMALL_STATES * max(row_bytes, 8)


def _restore_segment(
    segment: Segment,
    tables: Mapping[str, Table],
    ranges: Mapping[str, tuple[int, int]],
    pool: Any,
    report: RecoveryReport,
    direct_io: bool,
) -> set[int]:
    """Lay a segment's rows over the tables; the numbers of damaged chunks."""
    layout = segment.layout
    slot_bytes = max(
        (layout.rows_bytes(chunk[0], chunk[2]) for chunk in segment.chunks), default=ALIGNMENT
    )
    result = native.restore_segment(
        path=str(segment.path),
        tables=[
            native_table(layout, index, tables[spec.name].arrays())
            for index, spec in enumerate(layout.tables)
        ],
        wanted=[ranges[spec.name] for spec in layout.tables],
        chunks=segment.chunks,
        slots=native.SlotPool(num_slots=2, slot_bytes=slot_bytes),
        pool=pool,
        direct_io=direct_io,
    )
    report.segments_read += 1
    report.bytes_read += result["bytes_read"] + layout.header_bytes
    damaged = result["damaged"]
    if damaged:
        num_rows = sum(count for _, _, count, _, _ in damaged)
        report.damaged_segments.append(
            DamagedSegment(segment.path, f"{segment.path}: {damaged[0][3]}", num_rows)
        )
    places = {(table, first) for table, first, _, _, _ in damaged}
    return {number for number, chunk in enumerate(segment.chunks) if chunk[:2] in places}


def read_dense(manifest: Manifest, record: SegmentRecord, *, direct_io: bool = True) -> DensePart:
    """Read and verify a dense part.

    Raises:
        DamageError: any byte of it is not as committed.
    """
    segment = open_segment(manifest, record)
    layout = segment.layout
    arrays = [
        {"": torch.empty(spec.num_rows, dtype=spec.arrays[0].dtype)} for spec in layout.tables
    ]
    slot_bytes = max(
        (layout.rows_bytes(chunk[0], chunk[2]) for chunk in segment.chunks), default=ALIGNMENT
    )
    result = native.restore_segment(
        path=str(segment.path),
        tables=[native_table(layout, index, array) for index, array in enumerate(arrays)],
        wanted=[(0, spec.num_rows) for spec in layout.tables],
        chunks=segment.chunks,
        slots=native.SlotPool(num_slots=2, slot_bytes=slot_bytes),
        direct_io=direct_io,
    )
    if result["damaged"]:
        raise DamageError(f"{segment.path}: {result['damaged'][0][3]}")
    tensors = {
        spec.name: array[""].reshape(spec.shape or ())
        for spec, array in zip(layout.tables, arrays, strict=True)
    }
    part = DensePart(segment.metadata.get("skeleton"), tensors)
    try:
        read_position(part.tree())
    except DamageError as error:
        raise DamageError(f"{segment.path}: {error}") from error
    return part


def newest_readable_dense(
    manifest: Manifest, candidates: Sequence[SegmentRecord], report: RecoveryReport
) -> tuple[SegmentRecord, DensePart] | None:
    """The newest candidate that is undamaged; damaged ones are reported. None if there is none."""
    for record in reversed(candidates):
        try:
            return record, read_dense(manifest, record)
        except DamageError as error:
            path = manifest.path_of(record)
            report.damaged_segments.append(DamagedSegment(path, str(error), -1))
    return None
