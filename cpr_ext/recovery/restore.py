"""Restore rows: a manifest's segments, oldest first, each verified and written over the last.

The newest undamaged state of each row wins, so a damaged chunk leaves the row's older state.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.errors import DamageError, StorageError, StoreError
from cpr_ext.recovery.damage_accounting import Source, account, needs_account
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.state.dense_schema import read_position
from cpr_ext.state.dense_state import DensePart
from cpr_ext.state.position import MAX_COUNT
from cpr_ext.state.table import Table, shard_row_range
from cpr_ext.storage.manifest import Manifest, SegmentRecord
from cpr_ext.storage.reading import damage_of, native_read_errors
from cpr_ext.storage.segment_format import ALIGNMENT, ArraySpec, Segment, native_table
from cpr_ext.storage.segment_reader import SegmentRows
from cpr_ext.storage.store_reader import open_segment

# Per-row optimizer state takes at most so many times the bytes of the weight, unless a base has it.
_SMALL_STATES = 16


# One slot is filled while others wait to be laid over the tables: the disk is not to wait for that.
_NUM_SLOTS = 4


@dataclass(frozen=True)
class _ShardSegments:
    """The live segments of a shard, oldest first, as a recovery found them."""

    ranges: Mapping[str, tuple[int, int]]
    sources: list[Source]

    @property
    def usable(self) -> list[Source]:
        return [source for source in self.sources if source.rows is not None]


def restore_shards(
    manifests: Mapping[int, Manifest],
    num_shards: int,
    tables: Mapping[str, Table],
    pool: Any,
    report: RecoveryReport,
    *,
    direct_io: bool = True,
    up_to_snapshot: int = MAX_COUNT,
) -> dict[str, set[str]]:
    """Restore every row of shards from the live segments of their manifests, and nothing else.

    All files are read in one go, so that the disk does not wait between them.

    Args:
        manifests: of the shards to restore, by their numbers.
        up_to_snapshot: segments of newer snapshots are passed over.
        tables: the live tables by name; rows of other shards are not touched.
        report: counts are added to it, and which rows are older or missing because of damage.

    Returns:
        The names of the arrays restored, by table.

    Raises:
        StoreError: a segment does not fit the live tables; nothing was restored.
        StorageError: a segment could not be read; some rows may have been restored.
    """
    shards = []
    for number, manifest in manifests.items():
        ranges = {
            name: shard_row_range(table.num_embeddings, number, num_shards)
            for name, table in tables.items()
        }
        records = [r for r in manifest.segments if r.snapshot <= up_to_snapshot]
        sources = [_open(manifest, record, ranges, report, direct_io) for record in records]
        shards.append(_ShardSegments(ranges, sources))
    for shard in shards:
        make_missing_states([_segment(source) for source in shard.usable], tables)
    _restore_segments(shards, tables, pool, report, direct_io)
    restored: dict[str, set[str]] = {}
    for shard in shards:
        missing_before = report.rows_missing
        if needs_account(shard.sources):
            account(shard.ranges, shard.sources, report)
        num_rows = sum(end - begin for begin, end in shard.ranges.values())
        report.rows_restored += num_rows - (report.rows_missing - missing_before)
        for source in shard.usable:
            for spec in _segment(source).layout.tables:
                restored.setdefault(spec.name, set()).update(array.name for array in spec.arrays)
    return restored


def _segment(source: Source) -> Segment:
    assert source.rows is not None
    return source.rows.segment


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
        report.add_damaged(manifest.path_of(record), error)
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


def _restore_segments(
    shards: Sequence[_ShardSegments],
    tables: Mapping[str, Table],
    pool: Any,
    report: RecoveryReport,
    direct_io: bool,
) -> None:
    """Lay the rows of segments over the tables; each source notes which chunks are damaged."""
    found = [(source, shard.ranges) for shard in shards for source in shard.usable]
    results = native.restore_segments(
        [_native_source(_segment(source), tables, ranges) for source, ranges in found],
        slots=_slots([_segment(source) for source, _ in found]),
        pool=pool,
        direct_io=direct_io,
        **native_read_errors(*(_segment(source).path for source, _ in found)),
    )
    for (source, _), result in zip(found, results, strict=True):
        segment = _segment(source)
        report.segments_read += 1
        report.bytes_read += result["bytes_read"] + segment.layout.header_bytes
        damaged = result["damaged"]
        if error := damage_of(segment.path, result):
            num_rows = sum(count for _, _, count, _, _ in damaged)
            report.add_damaged(segment.path, error, num_rows)
        places = {(table, first) for table, first, _, _, _ in damaged}
        source.damaged |= {
            number for number, chunk in enumerate(segment.chunks) if chunk[:2] in places
        }


def _native_source(
    segment: Segment, tables: Mapping[str, Table], ranges: Mapping[str, tuple[int, int]]
) -> Any:
    layout = segment.layout
    return native.RestoreSource(
        path=str(segment.path),
        tables=[
            native_table(layout, index, tables[spec.name].arrays())
            for index, spec in enumerate(layout.tables)
        ],
        wanted=[ranges[spec.name] for spec in layout.tables],
        chunks=segment.chunks,
    )


def _slots(segments: Sequence[Segment]) -> Any:
    """Slots that hold any chunk of the segments."""
    slot_bytes = max(
        (
            segment.layout.rows_bytes(table, count)
            for segment in segments
            for table, _, count, _, _ in segment.chunks
        ),
        default=ALIGNMENT,
    )
    return native.SlotPool(num_slots=_NUM_SLOTS, slot_bytes=slot_bytes)


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
    result = native.restore_segment(
        path=str(segment.path),
        tables=[native_table(layout, index, array) for index, array in enumerate(arrays)],
        wanted=[(0, spec.num_rows) for spec in layout.tables],
        chunks=segment.chunks,
        slots=_slots([segment]),
        direct_io=direct_io,
        **native_read_errors(segment.path),
    )
    if error := damage_of(segment.path, result):
        raise error
    tensors = {
        spec.name: array[""].reshape(spec.shape or ())
        for spec, array in zip(layout.tables, arrays, strict=True)
    }
    part = DensePart(segment.metadata.get("skeleton"), tensors)
    try:
        read_position(part.tree())
    except DamageError as wrong:
        raise DamageError(f"{segment.path}: {wrong}") from wrong
    return part


def no_dense_part(report: RecoveryReport) -> DamageError | StorageError:
    """What to raise if a report lists every dense part there was, and none could be used."""
    newest = report.damaged_segments[0]
    if any(damaged.is_unreadable for damaged in report.damaged_segments):
        text = f"no dense part that can be read is left: {newest.reason}"
        return StorageError(errno.EIO, text, str(newest.path))
    return DamageError(f"no undamaged dense part is left: {newest.reason}")


def newest_readable_dense(
    manifest: Manifest, candidates: Sequence[SegmentRecord], report: RecoveryReport
) -> tuple[SegmentRecord, DensePart] | None:
    """The newest candidate that is undamaged; damaged ones are reported. None if there is none."""
    for record in reversed(candidates):
        try:
            return record, read_dense(manifest, record)
        except DamageError as error:
            report.add_damaged(manifest.path_of(record), error)
    return None
