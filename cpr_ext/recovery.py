"""Bring rows back: a manifest's segments, oldest first, each verified and laid over the last.

The newest undamaged state of each row wins, so a damaged chunk leaves the row's older state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.dense import DensePart
from cpr_ext.dense_tree import read_position
from cpr_ext.errors import DamageError, StoreError
from cpr_ext.manifest import Manifest, SegmentRecord
from cpr_ext.segment import ALIGNMENT, Segment, native_table, read_segment
from cpr_ext.tables import Table, shard_row_range


@dataclass(frozen=True)
class DamagedSegment:
    """A segment of which something could not be used.

    Attributes:
        path: the file.
        reason: what is wrong with it, the first of several.
        num_rows: rows that kept an older state because of it; -1 if the file does not tell.
    """

    path: Path
    reason: str
    num_rows: int


@dataclass
class RecoveryReport:
    """What a recovery brought back.

    Attributes:
        step: the step that training goes on from (0: the store was empty).
        num_samples: samples trained at that step.
        shards: the shards restored.
        rows_restored: rows of these shards now as saved (each counted once).
        rows_stale: rows whose last update is lost: restored to, or left in, an older state.
        samples_lost: samples trained since a lost shard's last snapshot, summed over the shards.
        segments_read, bytes_read: what was read for it.
        damaged_segments: what was not usable.
        seconds: how long it took.
        extra_state: what the caller saved with the snapshot (after a full restore).
        differences: with ``strict=False``: where the store's model differs, one sentence each.
    """

    step: int = 0
    num_samples: int = 0
    shards: tuple[int, ...] = ()
    rows_restored: int = 0
    rows_stale: int = 0
    samples_lost: int = 0
    segments_read: int = 0
    bytes_read: int = 0
    damaged_segments: list[DamagedSegment] = field(default_factory=list)
    seconds: float = 0.0
    extra_state: Any = None
    differences: list[str] = field(default_factory=list)


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
        report: counts are added to it.

    Returns:
        The names of the arrays restored, by table.

    Raises:
        StoreError: a segment does not fit the live tables; rows of older ones may be restored.
    """
    ranges = {
        name: shard_row_range(table.num_embeddings, shard, num_shards)
        for name, table in tables.items()
    }
    segments: list[Segment] = []
    for record in manifest.segments:
        try:
            segment = _open(manifest, record)
            _check_fits(segment, tables)
        except DamageError as error:
            path = manifest.path_of(record)
            report.damaged_segments.append(DamagedSegment(path, str(error), -1))
        else:
            segments.append(segment)
    for segment in segments:
        _restore_segment(segment, tables, ranges, pool, report, direct_io)
    if any(segment.metadata["kind"] == "base" for segment in segments):
        report.rows_restored += sum(end - begin for begin, end in ranges.values())
    restored: dict[str, set[str]] = {}
    for segment in segments:
        for spec in segment.layout.tables:
            restored.setdefault(spec.name, set()).update(array.name for array in spec.arrays)
    return restored


def _open(manifest: Manifest, record: SegmentRecord) -> Segment:
    return read_segment(
        manifest.path_of(record),
        header_bytes=record.header_bytes,
        header_crc32c=record.header_crc32c,
    )


def _check_fits(segment: Segment, tables: Mapping[str, Table]) -> None:
    """Raise StoreError if the segment's arrays are not those of the live tables."""
    for spec in segment.layout.tables:
        if (table := tables.get(spec.name)) is None:
            raise StoreError(f"{segment.path}: table '{spec.name}' is not in the model")
        arrays = table.arrays()
        for array in spec.arrays:
            if array.name not in arrays:
                table.make_row_state(array.name, array.row_shape, array.dtype)
                continue
            live = arrays[array.name]
            if live.dtype != array.dtype or tuple(live.shape[1:]) != array.row_shape:
                raise StoreError(
                    f"{segment.path}: '{spec.name}/{array.name}' has dtype {array.dtype} and "
                    f"rows of shape {array.row_shape}; the model has {live.dtype} and "
                    f"{tuple(live.shape[1:])}"
                )


def _restore_segment(
    segment: Segment,
    tables: Mapping[str, Table],
    ranges: Mapping[str, tuple[int, int]],
    pool: Any,
    report: RecoveryReport,
    direct_io: bool,
) -> None:
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
    if damaged := result["damaged"]:
        num_rows = sum(count for _, _, count, _, _ in damaged)
        report.rows_stale += num_rows
        report.damaged_segments.append(DamagedSegment(segment.path, damaged[0][3], num_rows))


def read_dense(manifest: Manifest, record: SegmentRecord, *, direct_io: bool = True) -> DensePart:
    """Read and verify a dense part.

    Raises:
        DamageError: any byte of it is not as committed.
    """
    segment = _open(manifest, record)
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
