"""Restore rows: a manifest's segments, oldest first, each verified and written over the last.

The newest undamaged state of each row wins, so a damaged chunk leaves the row's older state.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cpr_ext._native import native
from cpr_ext.errors import DamageError, StorageError, StoreError
from cpr_ext.recovery.damage_accounting import account
from cpr_ext.recovery.findings import Findings
from cpr_ext.recovery.progress import RecoveryProgress
from cpr_ext.recovery.shard_segments import ShardSegments, open_shard
from cpr_ext.state.dense_schema import read_position
from cpr_ext.state.dense_state import DensePart
from cpr_ext.state.stateful import Declared
from cpr_ext.state.table import WEIGHT, Table, shard_row_range
from cpr_ext.storage.manifest import Manifest, SegmentRecord
from cpr_ext.storage.retries import damage_of, native_read_errors
from cpr_ext.storage.rounded_chunks import RoundedTally
from cpr_ext.storage.segment_format import ALIGNMENT, ArraySpec, Segment, native_table
from cpr_ext.storage.store import Store
from cpr_ext.storage.store_reader import open_segment

# Per-row optimizer state takes at most so many times the bytes of the weight, unless a base has it.
_SMALL_STATES = 16
# One slot is filled while the rows of others are scattered: the disk does not wait for that.
_NUM_SLOTS = 4


@dataclass(frozen=True)
class LiveModel:
    """What a recovery restores, and how: ``threads`` scatter rows, reads are ``direct_io``."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    tables: Mapping[str, Table]
    threads: native.ThreadPool
    direct_io: bool
    declared: Declared = field(default_factory=Declared)


def restore_shards(
    store: Store, shards: Sequence[int], up_to_snapshot: int, live: LiveModel, findings: Findings
) -> dict[str, set[str]]:
    """Restore every row of shards from their live segments, and nothing else.

    All files are read in one go, so that the disk does not wait between them.

    Args:
        shards: their numbers; rows of other shards are not touched.
        up_to_snapshot: segments of newer snapshots are passed over.
        findings: counts are added, and which rows are older or missing because of damage.

    Returns:
        The names of the arrays restored, by table.

    Raises:
        StoreError: a segment does not fit the live tables; nothing was restored.
        StorageError: a segment could not be read; some rows may have been restored.
    """
    opened = []
    for shard in shards:
        ranges = {
            name: shard_row_range(table.num_embeddings, shard, store.num_shards)
            for name, table in live.tables.items()
        }
        manifest = store.shards[shard]
        records = [each for each in manifest.segments if each.snapshot <= up_to_snapshot]
        opened.append(open_shard(manifest, records, ranges, findings, live.direct_io))
    for shard_segments in opened:
        make_missing_states([s.rows.segment for s in shard_segments.usable], live.tables)
    _restore_segments(opened, live, findings)
    restored: dict[str, set[str]] = {}
    for shard_segments in opened:
        missing_before = findings.rows_missing
        account(shard_segments, shard_segments.ranges, findings)
        num_rows = sum(end - begin for begin, end in shard_segments.ranges.values())
        findings.rows_restored += num_rows - (findings.rows_missing - missing_before)
        tally = RoundedTally()
        for marks in shard_segments.marks.values():
            tally.add(marks)
        findings.add_rounded(tally, [usable.rows.segment for usable in shard_segments.usable])
        for usable in shard_segments.usable:
            for spec in usable.rows.segment.layout.tables:
                restored.setdefault(spec.name, set()).update(array.name for array in spec.arrays)
    return restored


def make_missing_states(segments: Sequence[Segment], tables: Mapping[str, Table]) -> None:
    """Make per-row states that the segments hold and the live tables do not have yet, all zero.

    Raises:
        StoreError: as :func:`missing_states`; nothing was made.
    """
    live = {
        name: {
            array: ArraySpec(array, tensor.dtype, tuple(tensor.shape[1:]))
            for array, tensor in table.arrays().items()
        }
        for name, table in tables.items()
    }
    for (name, _), array in missing_states(segments, live).items():
        tables[name].make_row_state(array.name, array.row_shape, array.dtype)


def missing_states(
    segments: Sequence[Segment], live: Mapping[str, Mapping[str, ArraySpec]]
) -> dict[tuple[str, str], ArraySpec]:
    """Return the per-row states that segments hold and tables do not have, by table and name.

    Args:
        live: the arrays of each table; its weight at least.

    Raises:
        StoreError: an array has another dtype or row shape than that of the table, or a state is
            larger than the segments justify.
    """
    in_bases = {
        (spec.name, array.name)
        for segment in segments
        if _holds_base(segment)
        for spec in segment.layout.tables
        for array in spec.arrays
    }
    needed: dict[tuple[str, str], ArraySpec] = {}
    for segment in segments:
        for spec in segment.layout.tables:
            arrays = live[spec.name]
            for array in spec.arrays:
                has = arrays.get(array.name)
                known = has or needed.setdefault((spec.name, array.name), array)
                wanted = (known.dtype, known.row_shape)
                if wanted != (array.dtype, array.row_shape):
                    raise StoreError(
                        f"{segment.path}: '{spec.name}/{array.name}' has dtype {array.dtype} and "
                        f"rows of shape {array.row_shape}; the model has {wanted[0]} and "
                        f"{wanted[1]}"
                    )
                is_in_base = (spec.name, array.name) in in_bases
                if has is None and not is_in_base and not _is_small(array, arrays[WEIGHT]):
                    raise StoreError(
                        f"{segment.path}: '{spec.name}/{array.name}' has rows of "
                        f"{array.row_bytes} bytes, and no base segment holds it for all rows"
                    )
    return needed


def _holds_base(segment: Segment) -> bool:
    return bool(segment.metadata["kind"] == "base")


def _is_small(array: ArraySpec, weight: ArraySpec) -> bool:
    """Refuse a state that a few rows of a segment would make the optimizer have for all rows."""
    return array.row_bytes <= _SMALL_STATES * max(weight.row_bytes, 8)


def _restore_segments(shards: Sequence[ShardSegments], live: LiveModel, findings: Findings) -> None:
    """Overwrite the tables by the rows of segments; each segment notes its damaged chunks."""
    for shard in shards:
        shard.make_marks()
    found = [(usable, shard) for shard in shards for usable in shard.usable]
    segments = [usable.rows.segment for usable, _ in found]
    results = native.restore_segments(
        [_native_source(usable.rows.segment, shard, live.tables) for usable, shard in found],
        slots=slots_for(segments),
        pool=live.threads,
        direct_io=live.direct_io,
        on_progress=RecoveryProgress(sum(usable.record.file_bytes for usable, _ in found)),
        **native_read_errors(*(segment.path for segment in segments)),
    )
    for (usable, _), segment, result in zip(found, segments, results, strict=True):
        findings.segments_read += 1
        findings.bytes_read += result["bytes_read"] + segment.layout.header_bytes
        damaged = result["damaged"]
        if error := damage_of(segment.path, result):
            num_rows = sum(count for _, _, count, _, _ in damaged)
            findings.add_damaged(segment.path, error, num_rows)
        places = {(table, first) for table, first, _, _, _ in damaged}
        usable.damaged |= {
            number for number, chunk in enumerate(segment.chunks) if chunk[:2] in places
        }


def _native_source(segment: Segment, shard: ShardSegments, tables: Mapping[str, Table]) -> Any:
    layout = segment.layout
    targets = []
    for index, spec in enumerate(layout.tables):
        target = native_table(layout, index, tables[spec.name].arrays())
        if (marks := shard.marks.get(spec.name)) is not None:
            of_row, of_exact = segment.marks(index)
            first = shard.ranges[spec.name][0]
            target.mark_rows(marks, first, of_row=of_row, of_exact=of_exact)
        targets.append(target)
    return native.RestoreSource(
        path=str(segment.path),
        tables=targets,
        wanted=[shard.ranges[spec.name] for spec in layout.tables],
        chunks=segment.chunks,
    )


def read_block(
    shard: ShardSegments, table: str, begin: int, end: int, slots: Any, *, direct_io: bool
) -> dict[str, torch.Tensor]:
    """Return rows [begin, end) of a table as a recovery would restore them: {array: (n, ...)}.

    Args:
        slots: of :func:`slots_for` the usable segments.

    Raises:
        DamageError: a chunk that may hold one of them is damaged.
        StorageError: it could not be read.
    """
    arrays: dict[str, torch.Tensor] = {}
    sources, paths = [], []
    for usable in shard.usable:
        rows, segment = usable.rows, usable.rows.segment
        if (spec := rows.table(table)) is None:
            continue
        for array in spec.arrays:
            shape = (end - begin, *array.row_shape)
            arrays.setdefault(array.name, torch.zeros(shape, dtype=array.dtype))
        spans = ((number, rows.span(number)) for number in rows.chunks_of(table))
        chunks = [segment.chunks[n] for n, (first, last) in spans if first < end and begin < last]
        if chunks:
            index = segment.layout.tables.index(spec)
            target = native_table(
                segment.layout, index, arrays, first_row_id=begin, is_on_host=True
            )
            sources.append(
                native.RestoreSource(
                    path=str(segment.path),
                    tables=[target],
                    wanted=[(begin, end)],
                    chunks=[(0, *chunk[1:]) for chunk in chunks],
                )
            )
            paths.append(segment.path)
    results = native.restore_segments(
        sources, slots=slots, direct_io=direct_io, **native_read_errors(*paths)
    )
    for path, result in zip(paths, results, strict=True):
        if error := damage_of(path, result):
            raise error
    return arrays


def slots_for(segments: Sequence[Segment]) -> Any:
    """Slots that hold any chunk of the segments."""
    slot_bytes = max(
        (
            segment.layout.most_chunk_bytes(chunk)
            for segment in segments
            for chunk in segment.chunks
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
        tables=[
            native_table(layout, index, array, is_on_host=True)
            for index, array in enumerate(arrays)
        ],
        wanted=[(0, spec.num_rows) for spec in layout.tables],
        chunks=segment.chunks,
        slots=slots_for([segment]),
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


def newest_undamaged(
    manifest: Manifest, candidates: Sequence[SegmentRecord], findings: Findings
) -> tuple[SegmentRecord, DensePart]:
    """Return the newest usable dense part; add damaged ones to the findings.

    Args:
        candidates: one or more of the manifest's segments, oldest first.

    Raises:
        DamageError: all are damaged; the message names the newest.
        StorageError: the same, and at least one could not be read.
    """
    num_known = len(findings.damaged_segments)
    for record in reversed(candidates):
        try:
            return record, read_dense(manifest, record)
        except DamageError as error:
            findings.add_damaged(manifest.path_of(record), error)
    damaged = findings.damaged_segments[num_known:]
    newest = damaged[0]
    if any(segment.is_unreadable for segment in damaged):
        text = f"no dense part that can be read is left: {newest.reason}"
        raise StorageError(errno.EIO, text, str(newest.path))
    raise DamageError(f"no undamaged dense part is left: {newest.reason}")
