"""Recovery of a model in training: of lost shards, of everything, from another store.

:mod:`cpr_ext.recovery.restore` reads single shards and dense parts; here is what a recovery does
with them, in which order, so that what is refused is refused before anything of the model has
changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Literal

import torch
from torch import nn

from cpr_ext.errors import StoreError
from cpr_ext.recovery.import_store import (
    TableTarget,
    match_tables,
    newest_undamaged,
    refuse_differences,
    row_state_differences,
    transplant_rows,
)
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.recovery.resharding import PartsPlan, newest_of_all
from cpr_ext.recovery.restore import newest_readable_dense, no_dense_part, restore_shards
from cpr_ext.recovery.verify import refuse_damage
from cpr_ext.state.dense_schema import read_position
from cpr_ext.state.dense_state import DensePart, dense_differences, restore_dense
from cpr_ext.state.position import MAX_COUNT, Position
from cpr_ext.state.table import Table, shard_row_range
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.store import Store
from cpr_ext.storage.store_reader import StoredTable, StoreReader
from cpr_ext.tracking.lookup_recorder import LookupRecorder
from cpr_ext.tracking.trackers import unsaved_updates

RecoveryMode = Literal["partial", "full"]
OnDamage = Literal["raise", "fall_back"]


class Recoverer:
    """Restores a live model, its optimizers and the trackers of its rows from a store.

    No snapshot may be in flight and no manifest may change while one of its methods runs.

    Args:
        trackers: by table name; restored rows are taken from them, since they equal the saved ones.
        recorder: it drops lookups of steps that a recovery reverts.
        threads: the pool that scatters rows.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        tables: Sequence[Table],
        store: Store,
        trackers: Mapping[str, Any],
        recorder: LookupRecorder,
        threads: Any,
        *,
        direct_io: bool,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._tables = tables
        self._by_name = {table.name: table for table in tables}
        self._store = store
        self._trackers = trackers
        self._recorder = recorder
        self._threads = threads
        self._direct_io = direct_io
        #: Of the dense part that was restored last.
        self.position = Position(0, 0, None)

    def recover_shards(self, report: RecoveryReport, *, on_damage: OnDamage) -> None:
        """Restore the rows of ``report.shards``, and nothing else; counts are added to it.

        Raises:
            DamageError: ``on_damage="raise"`` and a file of these shards is damaged.
        """
        if on_damage == "raise":
            shards = {shard: self._store.shards[shard] for shard in report.shards}
            refuse_damage(None, shards, self._stored(), self._store.num_shards)
        if not all(table.updates_only_looked_up_rows() for table in self._tables):
            report.rows_stale = None  # rows that no tracker calls dirty have changed, too
        for shard in report.shards:
            report.add_stale(
                sum(
                    self._trackers[table.name].num_dirty(*self._range(table, shard))
                    for table in self._tables
                )
            )
            self._count_lost_updates(shard, report)
        self._restore(report, is_live=True)

    def _count_lost_updates(self, shard: int, report: RecoveryReport) -> None:
        for table in self._tables:
            begin, end = self._range(table, shard)
            lost = unsaved_updates(self._trackers[table.name], begin, end)
            if lost is None or report.row_updates_lost is None:
                report.row_updates_lost = None
            else:
                report.row_updates_lost += lost

    def recover_all(
        self,
        mode: RecoveryMode,
        *,
        steps_done: int,
        on_damage: OnDamage,
        up_to_step: int | None = None,
    ) -> RecoveryReport:
        """Restore every shard and the dense part, and roll the store back to them.

        Args:
            up_to_step: what was saved at a later step is as if it were not there.
            steps_done: steps that the live model was trained; with some, an empty store is refused.

        Returns:
            What was restored; all zero if the store is empty.

        Raises:
            DamageError: no undamaged dense part is left, or ``on_damage="raise"`` and any file of
                the store is damaged.
        """
        if on_damage == "raise":
            shards = dict(enumerate(self._store.shards))
            refuse_damage(self._store.dense, shards, self._stored(), len(shards))
        report = RecoveryReport(shards=tuple(range(self._store.num_shards)))
        found = self._newest_dense(mode, up_to_step, report)
        if found is None and steps_done > 0:
            raise StoreError(
                f"'{self._store.directory}' holds nothing to go back to: no snapshot was committed "
                f"in {steps_done} steps. Build the model again and start from step 0"
            )
        if found is None:
            self.position = Position(0, 0, None)
            self._recorder.forget()
            self._store.roll_back(0)
            return report
        record, part = found
        self._restore_dense(part, report, rows_stale=0 if record.is_complete else None)
        self._store.roll_back(record.snapshot, keep=report.unreadable_paths)
        for name, arrays in self._restore(report, up_to_snapshot=record.snapshot).items():
            self._by_name[name].keep_row_states(arrays)
        self._forget_ambiguous(report)
        return report

    def recover_from(
        self, reader: StoreReader, mode: RecoveryMode, *, strict: bool, on_damage: OnDamage
    ) -> RecoveryReport:
        """Restore everything from another store, of any number of shards, which is only read.

        Raises:
            StoreError: the store's model is another one, or it holds no such snapshot.
            DamageError: as :meth:`recover_all`.
        """
        if on_damage == "raise":
            _refuse_damage_in(reader)
        report = RecoveryReport(shards=tuple(range(self._store.num_shards)))
        record, part = newest_undamaged(reader, full=mode == "full", report=report)
        part = part.named_as_in(self._model, self._tables)
        match = match_tables(reader, self._tables)
        live = {name: self._by_name[own_name] for name, own_name in match.names.items()}
        differences = [
            *match.differences,
            *row_state_differences(reader, record.snapshot, live),
            *dense_differences(part, self._model, self._optimizers, self._tables),
        ]
        if strict:
            refuse_differences(reader, differences)
        elif not match.names:
            self._refuse_nothing_in_common(reader, part, differences)
        report.differences = differences
        is_complete = record.is_complete and not differences
        self._restore_dense(part, report, strict=strict, rows_stale=0 if is_complete else None)
        ranges = {name: (0, reader.table(name).num_embeddings) for name in live}
        targets = {name: TableTarget(table) for name, table in live.items()}
        transplant_rows(reader, record.snapshot, targets, ranges, report, direct_io=self._direct_io)
        self._forget_ambiguous(report)
        self._begin_anew()
        return report

    def recover_from_parts(
        self,
        readers: Sequence[StoreReader],
        mode: RecoveryMode,
        *,
        strict: bool,
        on_damage: OnDamage,
    ) -> RecoveryReport:
        """Restore everything from the stores of processes that each held parts of the tables.

        Raises:
            StoreError: together they do not hold what the model needs, or hold no such snapshot.
            DamageError: as :meth:`recover_all`.
        """
        if on_damage == "raise":
            for reader in readers:
                _refuse_damage_in(reader)
        report = RecoveryReport(shards=tuple(range(self._store.num_shards)))
        stores, part = newest_of_all(readers, full=mode == "full", report=report)
        part = part.named_as_in(self._model, self._tables)
        plan = PartsPlan(stores, self._tables)
        differences = [
            *plan.differences,
            *dense_differences(part, self._model, self._optimizers, self._tables),
        ]
        if strict:
            refuse_differences(readers[0], differences)
        elif plan.is_empty:
            self._refuse_nothing_in_common(readers[0], part, differences)
        report.differences = differences
        self._restore_dense(part, report, strict=strict)
        report.rows_stale = report.row_updates_lost = None  # the stores are of several steps
        plan.copy(report, direct_io=self._direct_io)
        self._begin_anew()
        return report

    def _refuse_nothing_in_common(
        self, reader: StoreReader, part: DensePart, differences: Sequence[str]
    ) -> None:
        """Raise StoreError unless a dense parameter is in both; no table is."""
        live = self._model.state_dict(keep_vars=True)
        for name, value in part.tree()["model"].items():
            if getattr(live.get(name), "shape", None) == getattr(value, "shape", ()):
                return
        raise StoreError(
            f"'{reader.directory}' and the model have nothing in common, so nothing was recovered: "
            f"{'; '.join(differences[:4])}... Name a store of this model, or build the model that "
            "the store was made with"
        )

    def _forget_ambiguous(self, report: RecoveryReport) -> None:
        """Rows that damage made older, or took, may be among those that were not saved anyway."""
        if self.position.rows_unsaved and (report.older_rows or report.missing_rows):
            report.rows_stale = None

    def _begin_anew(self) -> None:
        """This store holds nothing yet of what was taken from another one."""
        self._store.roll_back(0)
        for table in self._tables:
            self._trackers[table.name].take_range(0, table.num_embeddings, weight=table.weight)

    def _restore_dense(
        self,
        part: DensePart,
        report: RecoveryReport,
        *,
        strict: bool = True,
        rows_stale: int | None = None,
    ) -> None:
        """Restore what is not a row; ``rows_stale``: rows that are older than it, None: unknown."""
        self.position = position = read_position(part.tree())
        restore_dense(part, self._model, self._optimizers, self._tables, strict=strict)
        self._recorder.forget()
        report.step, report.num_samples = position.step, position.num_samples
        report.extra_state = position.extra_state
        report.rows_stale = position.rows_unsaved if rows_stale is None else rows_stale
        report.row_updates_lost = 0 if report.rows_stale == 0 else None

    def _newest_dense(
        self, mode: RecoveryMode, up_to_step: int | None, report: RecoveryReport
    ) -> tuple[SegmentRecord, DensePart] | None:
        dense = self._store.dense
        candidates = [
            record
            for record in dense.segments
            if (record.is_complete or mode == "partial")
            and (up_to_step is None or record.last_step <= up_to_step)
        ]
        found = newest_readable_dense(dense, candidates, report)
        if found is None and candidates:
            raise no_dense_part(report)
        if found is None and dense.segments and up_to_step != 0:
            raise StoreError(
                "the store holds no full-recovery point: no snapshot saved every row at one step. "
                'Use AllRows(), or consistency="step" for base snapshots, or recover partially'
            )
        return found

    def _restore(
        self, report: RecoveryReport, *, is_live: bool = False, up_to_snapshot: int = MAX_COUNT
    ) -> dict[str, set[str]]:
        """Restore the rows of ``report.shards``; the names of the arrays restored, by table."""
        restored = restore_shards(
            {shard: self._store.shards[shard] for shard in report.shards},
            self._store.num_shards,
            self._by_name,
            self._threads,
            report,
            direct_io=self._direct_io,
            up_to_snapshot=up_to_snapshot,
        )
        for shard, table in product(report.shards, self._tables):
            # Restored rows are as saved: not dirty, and their change is measured from here.
            begin, end = self._range(table, shard)
            if is_live and report.damaged_segments:
                report.add_stale(-self._num_counted_twice(table, begin, end, report))
            self._trackers[table.name].take_range(begin, end, weight=table.weight)
        return restored

    def _num_counted_twice(self, table: Table, begin: int, end: int, report: RecoveryReport) -> int:
        """Rows looked up since they were saved that count as older or missing already."""
        dirty = torch.as_tensor(self._trackers[table.name].dirty_rows(begin, end))
        older = report.older_rows.get(table.name)
        found = [
            *([older.row_ids] if older is not None else []),
            *([report.missing_rows[table.name]] if table.name in report.missing_rows else []),
        ]
        return sum(int(torch.isin(row_ids, dirty).sum()) for row_ids in found)

    def _stored(self) -> dict[str, StoredTable]:
        return {
            table.name: StoredTable(
                table.name, table.num_embeddings, table.embedding_dim, table.weight.dtype
            )
            for table in self._tables
        }

    def _range(self, table: Table, shard: int) -> tuple[int, int]:
        return shard_row_range(table.num_embeddings, shard, self._store.num_shards)


def _refuse_damage_in(reader: StoreReader) -> None:
    shards = dict(enumerate(reader.shards))
    refuse_damage(reader.dense, shards, reader.tables, len(shards))
