"""Read other stores, of any number of shards: their newest dense part, and rows into a live model.

The stores are only read. Rows are copied block by block, and only chunks that hold a wanted row are
read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cpr_ext.errors import StoreError
from cpr_ext.recovery.damage_accounting import account
from cpr_ext.recovery.findings import Findings
from cpr_ext.recovery.part_copy import PartCopy
from cpr_ext.recovery.restore import newest_undamaged
from cpr_ext.recovery.shard_segments import ShardSegments, open_shard
from cpr_ext.state.dense_state import DensePart
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.newest_rows import NewestRows
from cpr_ext.storage.rounded_chunks import RoundedTally
from cpr_ext.storage.segment_format import ArraySpec
from cpr_ext.storage.store_reader import StoreReader

BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class StoreAt:
    """A store, and the snapshot to take from it: one it committed as a whole."""

    reader: StoreReader
    record: SegmentRecord

    @property
    def snapshot(self) -> int:
        """The number of the snapshot."""
        return self.record.snapshot


def newest_of_all(
    readers: Sequence[StoreReader], *, full: bool, findings: Findings
) -> tuple[list[StoreAt], SegmentRecord, DensePart]:
    """Return each store's newest snapshot, and the newest dense part of all.

    Args:
        full: the newest step at which every store has a full-recovery point.

    Raises:
        StoreError: a store holds no snapshot, or there is no such step.
        DamageError: no undamaged dense part is left in a store.
    """
    for reader in readers:
        reader.newest(full=full)
    if full:
        first, points = readers[0].dense, _common_points(readers)
        candidates = [r for r in first.segments if r.is_complete and r.last_step in points[0]]
        record, part = newest_undamaged(first, candidates, findings)
        records = [record, *(of_store[record.last_step] for of_store in points[1:])]
    else:
        found = [newest_undamaged(r.dense, r.dense.segments, findings) for r in readers]
        records = [record for record, _ in found]
        record, part = max(found, key=lambda item: item[0].last_step)
    stores = [StoreAt(r, at) for r, at in zip(readers, records, strict=True)]
    return stores, record, part


def newest_records(readers: Sequence[StoreReader], *, full: bool) -> list[SegmentRecord]:
    """Return each store's newest snapshot; ``full``: its newest point of one common step.

    Raises:
        StoreError: a store holds no such snapshot, or there is no such step.
    """
    newest = [reader.newest(full=full) for reader in readers]
    if not full:
        return newest
    return [points[max(points)] for points in _common_points(readers)]


def _common_points(readers: Sequence[StoreReader]) -> list[dict[int, SegmentRecord]]:
    """Return each store's full-recovery points by step, of steps that all stores have."""
    points = [
        {r.last_step: r for r in reader.dense.segments if r.is_complete} for reader in readers
    ]
    steps = set.intersection(*(set(of_store) for of_store in points))
    if not steps:
        names = ", ".join(f"'{reader.directory}'" for reader in readers)
        raise StoreError(f"{names}: no step at which every one of them has a full-recovery point")
    return [{step: of_store[step] for step in steps} for of_store in points]


def stored_arrays(store: StoreAt) -> dict[str, dict[str, ArraySpec]]:
    """Return the weight and per-row states of a store's readable segments, by table and name."""
    found: dict[str, dict[str, ArraySpec]] = {}
    for number in range(store.reader.num_shards):
        for usable in open_at(store, number, Findings(), direct_io=False).usable:
            for spec in usable.rows.segment.layout.tables:
                arrays = found.setdefault(spec.name, {})
                arrays.update({array.name: array for array in spec.arrays})
    return found


def import_rows(
    store: StoreAt,
    copies: Mapping[str, Sequence[PartCopy]],
    findings: Findings,
    *,
    direct_io: bool = True,
) -> None:
    """Copy rows of a store's snapshot into live tables.

    Args:
        copies: what to take of each stored table, by its name there. Arrays without a place in the
            live table are left out.
        findings: counts are added. Where something is damaged, rows fall back to their older state.
    """
    for number in range(store.reader.num_shards):
        wanted = {}
        for name, of_table in copies.items():
            begin, end = store.reader.row_range(name, number)
            begin = max(begin, min(copy.stored_rows[0] for copy in of_table))
            end = min(end, max(copy.stored_rows[1] for copy in of_table))
            if begin < end:
                wanted[name] = begin, end
        if not wanted:
            continue
        shard = open_at(store, number, findings, direct_io=direct_io)
        segments = [usable.rows for usable in shard.usable]
        tally = RoundedTally()
        for name, (begin, end) in wanted.items():
            rows = NewestRows(name, segments, on_damage=partial(shard.note_damage, findings))
            _copy(rows, copies[name], begin, end, findings, tally)
        account(shard, wanted, findings)
        findings.add_rounded(tally, [rows.segment for rows in segments])
        findings.segments_read += len(segments)
        findings.bytes_read += sum(segment.bytes_read for segment in segments)


def open_at(store: StoreAt, number: int, findings: Findings, *, direct_io: bool) -> ShardSegments:
    """Open a shard's segments up to the store's snapshot; damage is noted in the findings."""
    reader = store.reader
    ranges = {name: reader.row_range(name, number) for name in reader.tables}
    manifest = reader.shards[number]
    records = [each for each in manifest.segments if each.snapshot <= store.snapshot]
    return open_shard(manifest, records, ranges, findings, direct_io)


def _copy(
    rows: NewestRows,
    copies: Sequence[PartCopy],
    begin: int,
    end: int,
    findings: Findings,
    tally: RoundedTally,
) -> None:
    taken = [
        (copy, [array.name for array in rows.arrays if copy.make_place(array)]) for copy in copies
    ]
    block_rows = max(1, BLOCK_BYTES // max(1, sum(array.row_bytes for array in rows.arrays)))
    for at in range(begin, end, block_rows):
        block = rows.range(at, min(at + block_rows, end))
        is_held = block.not_after >= 0
        wanted = [is_held & copy.takes(block.row_ids) for copy, _ in taken]
        is_taken = torch.stack(wanted).any(0)
        findings.rows_restored += int(is_taken.sum())
        tally.add(block.marks[is_taken])
        for (copy, names), mine in zip(taken, wanted, strict=True):
            for name in names:
                copy.put(name, block.row_ids[mine], block.arrays[name][mine])
