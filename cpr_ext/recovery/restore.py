"""Restore rows: segments, oldest first, each verified and written over the last.

The newest undamaged state of each row wins, so a damaged chunk leaves the row's older state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cpr_ext._native import native
from cpr_ext.errors import DamageError, StoreError
from cpr_ext.recovery.damage_accounting import (
    OpenedSegments,
    Ranges,
    account,
    open_up_to,
)
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.state.dense_schema import read_position
from cpr_ext.state.dense_state import DensePart
from cpr_ext.state.position import Position
from cpr_ext.state.stateful import Declared
from cpr_ext.state.table import WEIGHT, Table
from cpr_ext.storage import retries
from cpr_ext.storage.file_names import MANIFEST_FILE
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.retries import damage_of, exists
from cpr_ext.storage.segment_format import (
    ALIGNMENT,
    ArraySpec,
    Chunk,
    Segment,
    SegmentLayout,
    native_table,
    table_in_file,
)
from cpr_ext.storage.store_reader import StoreReader

logger = logger_of("recovery")

_SECONDS_BETWEEN_LINES = 10.0


class RecoveryProgress:
    """Logs how much of the files is read, at most every ten seconds.

    Args:
        total_bytes: of the files that are read.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._began = self._logged = time.monotonic()

    def __call__(self, bytes_read: int) -> None:
        """Note that so many bytes are read by now, in all."""
        now = time.monotonic()
        if now - self._logged < _SECONDS_BETWEEN_LINES:
            return
        self._logged = now
        seconds = now - self._began
        left = max(0, self._total_bytes - bytes_read)
        logger.info(
            "recovering: %.1f of %.1f GB are read, %.2f GB/s, about %.0f s to go",
            *(bytes_read / 1e9, self._total_bytes / 1e9, bytes_read / seconds / 1e9),
            left * seconds / max(1, bytes_read),
        )


# Per-row optimizer state takes at most so many times the bytes of the weight, unless a base has it.
_SMALL_STATES = 16
# One slot is filled while the rows of others are scattered: the disk does not wait for that.
_NUM_SLOTS = 4
# Of the smallest slot, which holds many small chunks.
_SLOT_BYTES = 512 << 10


@dataclass(frozen=True)
class LiveModel:
    """What a recovery restores, and how: ``threads`` scatter rows, reads are ``direct_io``."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    tables: Mapping[str, Table]
    threads: native.ThreadPool
    direct_io: bool
    declared: Declared = field(default_factory=Declared)


def restore_rows(
    reader: StoreReader,
    wanted: Sequence[Ranges] | None,
    up_to_snapshot: int,
    live: LiveModel,
    findings: RecoveryReport,
) -> dict[str, set[str]]:
    """Restore rows from the live segments, and nothing else.

    All files are read in one go, so that the disk does not wait between them. Only chunks that hold
    a wanted row are read.

    Args:
        wanted: rows [begin, end) of each table; several such, of which none overlap. None: all.
        up_to_snapshot: segments of newer snapshots are passed over.
        findings: counts are added, and which rows are older or missing because of damage.

    Returns:
        The names of the arrays restored, by table.

    Raises:
        StoreError: a segment does not fit the live tables; nothing was restored.
        StorageError: a segment could not be read; some rows may have been restored.
    """
    opened = open_up_to(reader, up_to_snapshot, findings, live.direct_io)
    segments = [usable.rows.segment for usable in opened.usable]
    shapes = {name: _shapes_of(table) for name, table in live.tables.items()}
    for (name, _), array in missing_states(segments, shapes).items():
        live.tables[name].make_row_state(array.name, array.row_shape, array.dtype)
    _restore_segments(opened, wanted, live, findings)
    restored: dict[str, set[str]] = {}
    for ranges in [reader.manifest.model.row_ranges] if wanted is None else wanted:
        missing_before = findings.rows_missing
        account(opened, ranges, findings)
        num_rows = sum(end - begin for begin, end in ranges.values())
        findings.rows_restored += num_rows - (findings.rows_missing - missing_before)
    for segment in segments:
        for spec in segment.layout.tables:
            restored.setdefault(spec.name, set()).update(array.name for array in spec.arrays)
    # A row that several segments hold was counted with each of them.
    findings.rows_rounded = min(findings.rows_rounded, findings.rows_restored)
    return restored


def _shapes_of(table: Table) -> dict[str, ArraySpec]:
    return {
        array: ArraySpec(array, tensor.dtype, tuple(tensor.shape[1:]))
        for array, tensor in table.arrays().items()
    }


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


def _restore_segments(
    opened: OpenedSegments,
    wanted: Sequence[Ranges] | None,
    live: LiveModel,
    findings: RecoveryReport,
) -> None:
    """Overwrite the tables by the rows of segments; each segment notes its damaged chunks."""
    targets = _Targets({name: table.arrays() for name, table in live.tables.items()})
    all_rows = {name: (0, table.num_embeddings) for name, table in live.tables.items()}
    found, sources = [], []
    for usable in opened.usable:
        rows = usable.rows
        for ranges in [all_rows] if wanted is None else wanted:
            chunks = rows.segment.chunks if wanted is None else rows.chunks_in(ranges)
            if chunks:
                found.append(usable)
                sources.append(_native_source(rows.segment, ranges, chunks, targets))
    slot_bytes = max((source.slot_bytes for source in sources), default=0)
    file_bytes = {usable.rows.segment.path: usable.record.file_bytes for usable in found}
    results = native.restore_segments(
        sources,
        slots=native.SlotPool(num_slots=_NUM_SLOTS, slot_bytes=max(slot_bytes, _SLOT_BYTES)),
        pool=live.threads,
        direct_io=live.direct_io,
        on_progress=RecoveryProgress(sum(file_bytes.values())),
        pauses_seconds=retries.pauses_seconds,
    )
    findings.segments_read += len(file_bytes)
    for usable, group in groupby(zip(found, results, strict=True), itemgetter(0)):
        segment, damaged, error = usable.rows.segment, set(), None
        findings.bytes_read += segment.layout.header_bytes
        for _, result in group:  # of several ranges, which may share a damaged chunk
            findings.rows_rounded += sum(
                count
                for count, spec in zip(result["rows_restored"], segment.layout.tables, strict=True)
                if spec.is_rounded
            )
            findings.bytes_read += result["bytes_read"]
            damaged |= {(table, first) for table, first, *_ in result["damaged"]}
            error = error or damage_of(segment.path, result)
        usable.damaged |= {n for n, chunk in enumerate(segment.chunks) if chunk[:2] in damaged}
        if error is not None:
            num_rows = sum(segment.chunks[number].num_rows for number in usable.damaged)
            findings.add_damaged(segment.path, error, num_rows)


@dataclass
class _Targets:
    """Native tables that rows are restored to: each is described once for all segments.

    Attributes:
        arrays: each (num_rows, ...), by table and name.
    """

    arrays: Mapping[str, Mapping[str, torch.Tensor]]
    _described: dict[str, tuple[tuple[ArraySpec, ...], Any]] = field(default_factory=dict)

    def table(self, layout: SegmentLayout, index: int) -> native.SegmentTable:
        """Return a table of a segment, joined with the arrays that the segment has of it."""
        spec = layout.tables[index]
        arrays, described = self._described.get(spec.name, (None, None))
        if described is None or arrays is not spec.arrays:  # one object, see segment_header.py
            described = native_table(layout, index, self.arrays[spec.name])
            self._described[spec.name] = spec.arrays, described
        return table_in_file(layout, index, described)


def _native_source(
    segment: Segment, ranges: Ranges, chunks: list[Chunk], targets: _Targets
) -> native.RestoreSource:
    layout = segment.layout
    return native.RestoreSource(
        path=str(segment.path),
        tables=[targets.table(layout, index) for index in range(len(layout.tables))],
        wanted=[ranges[spec.name] for spec in layout.tables],
        chunks=chunks,
    )


def slots_for(segments: Sequence[Segment]) -> Any:
    """Slots that hold any chunk of the segments."""
    slot_bytes = max(
        (
            segment.layout.rows_bytes(chunk.table, chunk.num_rows)
            for segment in segments
            for chunk in segment.chunks
        ),
        default=ALIGNMENT,
    )
    return native.SlotPool(num_slots=_NUM_SLOTS, slot_bytes=slot_bytes)


def read_dense(reader: StoreReader, record: SegmentRecord, *, direct_io: bool = True) -> DensePart:
    """Read and verify a dense part.

    Raises:
        DamageError: any byte of it is not as committed.
    """
    segment = reader.open(record)
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
        pauses_seconds=retries.pauses_seconds,
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
    reader: StoreReader, candidates: Sequence[SegmentRecord], findings: RecoveryReport
) -> tuple[SegmentRecord, DensePart]:
    """Return the newest usable dense part; add damaged ones to the findings.

    Args:
        candidates: one or more of the store's dense parts, oldest first.

    Raises:
        DamageError: all are damaged; the message names the newest.
        StorageError: one could not be read.
    """
    num_known = len(findings.damaged_segments)
    for record in reversed(candidates):
        try:
            return record, read_dense(reader, record)
        except DamageError as error:
            findings.add_damaged(reader.path_of(record), error)
    newest = findings.damaged_segments[num_known]
    raise DamageError(f"no undamaged dense part is left: {newest.reason}")


def position(directory: str | os.PathLike[str]) -> Position:
    """Return where ``recover()`` would resume, before there is a model or an optimizer.

    Args:
        directory: a store, which may be in use; or a place where none is yet.

    Returns:
        ``step`` and ``num_samples`` (both 0 where nothing is saved), and ``values``: by name, what
        the callables of ``Checkpointer(state=...)`` returned then.

    Raises:
        DamageError: the manifest, or each dense part, is damaged.
        StorageError: a file could not be read.
    """
    if not exists(Path(directory) / MANIFEST_FILE):
        return Position(0, 0, {})
    reader = StoreReader(directory)
    if reader.manifest.newest is None:
        return Position(0, 0, {})
    _, part = newest_undamaged(reader, reader.manifest.dense, RecoveryReport())
    return read_position(part.tree())
