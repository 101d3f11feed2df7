"""Read other stores: their newest dense part, and rows into a live model.

The stores are only read. Rows are copied block by block, and only chunks that hold a wanted row are
read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cpr_ext.errors import StoreError
from cpr_ext.recovery.damage_accounting import OpenedSegments, account, open_up_to
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.recovery.restore import newest_undamaged
from cpr_ext.state.dense_state import DensePart
from cpr_ext.state.slot_keys import is_key_array
from cpr_ext.state.table import NO_KEYS, Table
from cpr_ext.state.table_part import TablePart
from cpr_ext.storage.manifest import SegmentRecord, StoredTable
from cpr_ext.storage.segment_format import ArraySpec
from cpr_ext.storage.store_reader import NewestRows, StoreReader


@dataclass(frozen=True)
class PartCopy:
    """What a live table takes from one stored table.

    Attributes:
        held, wanted: the parts that the store and the live table hold.
        common: the part that both hold.
    """

    table: Table
    held: TablePart
    wanted: TablePart
    common: TablePart

    @property
    def stored_rows(self) -> tuple[int, int]:
        """The rows [begin, end) to take, as the store numbers them."""
        begin, end = self.common.rows
        return begin - self.held.rows[0], end - self.held.rows[0]

    def takes(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return (n,) bool: which rows to take, as the store numbers them."""
        first, last = self.stored_rows
        return (row_ids >= first) & (row_ids < last)

    @property
    def has_same_columns(self) -> bool:
        """Rows can be taken as they are: the columns are cut alike."""
        return self.held.columns == self.wanted.columns

    @property
    def share(self) -> float:
        """Which share of the live table's columns it has."""
        return self.common.shape[1] / self.wanted.shape[1]

    def misfit(self, array: ArraySpec) -> str | None:
        """Return why an array of the store does not fit the live table; None if it fits."""
        what = f"'{self.wanted.table}/{array.name}'"
        live, row_shape = self.table.arrays().get(array.name), self._live_row_shape(array)
        if live is None and is_key_array(array.name):
            return NO_KEYS.format(table=self.wanted.table, array=array.name)
        if live is None and not self.table.can_make_row_state():
            return f"{what} is no state that the model's optimizer has"
        if row_shape is None:
            return f"{what} has rows of shape {array.row_shape}, which cannot be cut"
        if live is None or (live.dtype, tuple(live.shape[1:])) == (array.dtype, row_shape):
            return None  # the optimizer has not made it yet, or has one like it
        return (
            f"{what} has dtype {array.dtype} and rows of shape {array.row_shape}, the model "
            f"{live.dtype} and {tuple(live.shape[1:])}"
        )

    def make_place(self, array: ArraySpec) -> bool:
        """Make a per-row state that the optimizer has not made yet; False if it has no place."""
        if self.misfit(array) is not None:
            return False
        row_shape = self._live_row_shape(array)
        if array.name not in self.table.arrays() and row_shape is not None:
            self.table.make_row_state(array.name, row_shape, array.dtype)
        return True

    def put_all(self, arrays: Mapping[str, torch.Tensor]) -> int:
        """Write all rows to take of arrays that are in memory; return how many rows these are."""
        begin, end = self.stored_rows
        for name, values in arrays.items():
            if self.make_place(ArraySpec(name, values.dtype, tuple(values.shape[1:]))):
                self.put(name, torch.arange(begin, end), values[begin:end])
        return end - begin

    def put(self, array: str, row_ids: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows ``row_ids`` (n,) of those to take, as stored: ``values`` (n, ...)."""
        live = self.table.arrays()[array]
        rows = (row_ids + self.held.rows[0] - self.wanted.rows[0]).to(live.device)
        values = values.to(live.device)
        if live.dim() == 2 and not self.has_same_columns:
            live[rows, self._columns_in(self.wanted)] = values[:, self._columns_in(self.held)]
        elif self.share == 1:
            live[rows] = values
        else:
            live[rows] += self.share * values

    def _live_row_shape(self, array: ArraySpec) -> tuple[int, ...] | None:
        """Return the shape of a live row of such an array; None if its rows cannot be cut."""
        if self.has_same_columns or array.row_shape == ():
            return array.row_shape
        return self.wanted.shape[1:] if array.row_shape == self.held.shape[1:] else None

    def _columns_in(self, part: TablePart) -> slice:
        begin, end = self.common.columns
        return slice(begin - part.columns[0], end - part.columns[0])


def part_of(table: Table | StoredTable, *, as_whole: bool = False) -> TablePart:
    """Return the part that a table is; without one, or ``as_whole``, the whole table."""
    num_rows, dim = table.num_embeddings, table.embedding_dim
    whole = TablePart(table.name, (0, num_rows), (0, dim), num_rows, dim)
    return whole if as_whole or table.part is None else table.part


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
    readers: Sequence[StoreReader], *, full: bool, findings: RecoveryReport
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
        first, points = readers[0], _common_points(readers)
        candidates = [r for r in first.manifest.dense if r.is_complete and r.last_step in points[0]]
        record, part = newest_undamaged(first, candidates, findings)
        records = [record, *(of_store[record.last_step] for of_store in points[1:])]
    else:
        found = [newest_undamaged(r, r.manifest.dense, findings) for r in readers]
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
        {r.last_step: r for r in reader.manifest.dense if r.is_complete} for reader in readers
    ]
    steps = set.intersection(*(set(of_store) for of_store in points))
    if not steps:
        names = ", ".join(f"'{reader.directory}'" for reader in readers)
        raise StoreError(f"{names}: no step at which every one of them has a full-recovery point")
    return [{step: of_store[step] for step in steps} for of_store in points]


def stored_arrays(store: StoreAt) -> dict[str, dict[str, ArraySpec]]:
    """Return the weight and per-row states of a store's readable segments, by table and name."""
    found: dict[str, dict[str, ArraySpec]] = {}
    for usable in open_at(store, RecoveryReport(), direct_io=False).usable:
        for spec in usable.rows.segment.layout.tables:
            arrays = found.setdefault(spec.name, {})
            arrays.update({array.name: array for array in spec.arrays})
    return found


def import_rows(
    store: StoreAt,
    copies: Mapping[str, Sequence[PartCopy]],
    findings: RecoveryReport,
    *,
    direct_io: bool = True,
) -> None:
    """Copy rows of a store's snapshot into live tables.

    Args:
        copies: what to take of each stored table, by its name there. Arrays without a place in the
            live table are left out.
        findings: counts are added. Where something is damaged, rows fall back to their older state.
    """
    wanted = {}
    for name, of_table in copies.items():
        begin = min(copy.stored_rows[0] for copy in of_table)
        end = max(copy.stored_rows[1] for copy in of_table)
        if begin < end:
            wanted[name] = begin, end
    if not wanted:
        return
    opened = open_at(store, findings, direct_io=direct_io)
    segments = [usable.rows for usable in opened.usable]
    for name, (begin, end) in wanted.items():
        rows = NewestRows(name, segments, on_damage=partial(opened.note_damage, findings))
        _copy(rows, copies[name], begin, end, findings)
    account(opened, wanted, findings)
    findings.segments_read += len(segments)
    findings.bytes_read += sum(segment.bytes_read for segment in segments)


def open_at(store: StoreAt, findings: RecoveryReport, *, direct_io: bool) -> OpenedSegments:
    """Open the segments up to the store's snapshot; damage is noted in the findings."""
    return open_up_to(store.reader, store.snapshot, findings, direct_io)


def _copy(
    rows: NewestRows,
    copies: Sequence[PartCopy],
    begin: int,
    end: int,
    findings: RecoveryReport,
) -> None:
    taken = [
        (copy, [array.name for array in rows.arrays if copy.make_place(array)]) for copy in copies
    ]
    is_rounded = any(segment.is_rounded(rows.table) for segment in rows.segments)
    block_rows = max(1, BLOCK_BYTES // max(1, sum(array.row_bytes for array in rows.arrays)))
    for at in range(begin, end, block_rows):
        block = rows.range(at, min(at + block_rows, end))
        is_held = block.steps >= 0
        wanted = [is_held & copy.takes(block.row_ids) for copy, _ in taken]
        is_taken = torch.stack(wanted).any(0)
        findings.rows_restored += int(is_taken.sum())
        if is_rounded:
            findings.rows_rounded += int(is_taken.sum())
        for (copy, names), mine in zip(taken, wanted, strict=True):
            for name in names:
                copy.put(name, block.row_ids[mine], block.arrays[name][mine])
