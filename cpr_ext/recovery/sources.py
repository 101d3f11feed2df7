"""Where a recovery takes its state from: this process's store, or other stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from cpr_ext.errors import StoreError
from cpr_ext.recovery.damage_accounting import Ranges
from cpr_ext.recovery.import_store import newest_of_all, part_of
from cpr_ext.recovery.replicated_tables import Regrouped, regroup
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.recovery.resharding import CopyPlan
from cpr_ext.recovery.restore import LiveModel, newest_undamaged, restore_rows
from cpr_ext.recovery.verify import refuse_damage
from cpr_ext.state.dense_schema import read_position
from cpr_ext.state.dense_state import DensePart, dense_differences, without_optimizers
from cpr_ext.state.position import MAX_COUNT
from cpr_ext.state.table import Table
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.store import Store
from cpr_ext.storage.store_reader import StoreReader


class RowsSource(Protocol):
    """Where lost rows come from."""

    def refuse_damage(self) -> None:
        """Read all that the recovery needs; raises DamageError that names everything damaged."""

    def copy_rows(self, findings: RecoveryReport) -> None:
        """Write the newest rows that are wanted into the live tables, and count them."""


class ModelSource(RowsSource, Protocol):
    """Where a whole model comes from.

    Attributes:
        snapshot: of this process's store, the newest one that the state belongs to; 0: none.
    """

    snapshot: int

    @property
    def tables(self) -> Sequence[Table]:
        """The tables whose rows it restores."""

    @property
    def is_of_job(self) -> bool:
        """Whether it is the state of several processes."""

    def newest(self, findings: RecoveryReport) -> DensePart | None:
        """Find the newest usable dense part, and refuse another model; changes nothing live.

        ``findings`` get the stale rows and the differences. None: nothing was saved or trained yet.
        """


@dataclass
class OwnStore:
    """This process's store, in which training resumes.

    Args:
        lost: the rows of a live model to restore, without the dense part, as
            :func:`restore_rows` takes them; None: everything.
        full: go back to the newest full-recovery point.
        up_to_step: what was saved at a later step is as if it were not there.
        at_step: go back to the full-recovery point of this step, and to no other.
        steps_done: steps that the live model was trained; with some, an empty store is refused.
    """

    store: Store
    live: LiveModel
    lost: Sequence[Ranges] | None = None
    full: bool = False
    up_to_step: int | None = None
    at_step: int | None = None
    steps_done: int = 0
    snapshot: int = field(default=0, init=False)
    is_of_job: bool = field(default=False, init=False)
    _reader: StoreReader = field(init=False)

    def __post_init__(self) -> None:
        self._reader = self.store.view()

    @property
    def tables(self) -> Sequence[Table]:
        """See :class:`ModelSource`."""
        return list(self.live.tables.values())

    def refuse_damage(self) -> None:
        """See :class:`RowsSource`."""
        refuse_damage(self._reader, self.lost)

    def newest(self, findings: RecoveryReport) -> DensePart | None:
        """See :class:`ModelSource`."""
        dense = self._reader.manifest.dense
        limit = MAX_COUNT if self.up_to_step is None else self.up_to_step
        candidates = [
            record
            for record in dense
            if (record.is_complete or not self.full) and record.last_step <= limit
        ]
        if self.at_step is not None:
            candidates = self._points_at(self.at_step)
        if candidates:
            record, part = newest_undamaged(self._reader, candidates, findings)
            self.snapshot = record.snapshot
            findings.is_complete = record.is_complete
            findings.rows_stale = _stale_rows(part, record)
            return part
        if dense and limit > 0:
            raise StoreError(
                "the store holds no full-recovery point: no snapshot saved every row at one step. "
                "Call save(), or use AllRows(), or recover partially"
            )
        if self.steps_done > 0:
            raise StoreError(
                f"'{self.store.directory}' holds nothing to go back to: no snapshot was committed "
                f"in {self.steps_done} steps. Build the model again and start from step 0"
            )
        return None

    def _points_at(self, step: int) -> list[SegmentRecord]:
        points = [record for record in self._reader.manifest.dense if record.is_complete]
        if not (found := [record for record in points if record.last_step == step]):
            kept = ", ".join(str(record.last_step) for record in points) or "none"
            raise StoreError(
                f"'{self.store.directory}' keeps no full-recovery point of step {step}; those it "
                f"keeps are of steps: {kept}. Retention(full_recovery_points=...) keeps more"
            )
        return found

    def copy_rows(self, findings: RecoveryReport) -> None:
        """See :class:`RowsSource`; with everything, optimizer state that was not saved is dropped.

        Raises:
            StoreError: a segment does not fit the live tables; no row was restored.
            StorageError: a segment could not be read; some rows may have been restored.
        """
        live, is_all = self.live, self.lost is None
        snapshot = self.snapshot if is_all else MAX_COUNT
        restored = restore_rows(self._reader, self.lost, snapshot, live, findings)
        for name, arrays in restored.items() if is_all else ():
            live.tables[name].keep_row_states(arrays)
        for name, table in live.tables.items() if is_all else ():
            if len(findings.not_newest(name)):  # their state may be gone, and a step count left
                table.drop_half_state()


@dataclass
class OtherStores:
    """Other stores, which are only read.

    Args:
        full: take the newest step at which all have a full-recovery point.
        by_name: one store, whose tables have the names of the live ones. Else the stores of
            processes that each held parts of the tables.
        strict: refuse a model that differs; else take what matches.
        weights_only: what optimizers know is left out.
    """

    readers: Sequence[StoreReader]
    live: LiveModel
    full: bool
    by_name: bool
    strict: bool
    weights_only: bool = False
    snapshot: int = field(default=0, init=False)
    _replicated: Sequence[Table] = field(default=(), init=False)
    _plan: CopyPlan | None = field(default=None, init=False)

    @property
    def tables(self) -> Sequence[Table]:
        """See :class:`ModelSource`; with the live ones that the stores alone have by row."""
        return [*self.live.tables.values(), *self._replicated]

    @property
    def is_of_job(self) -> bool:
        """See :class:`ModelSource`."""
        is_rekeyed = self._plan is not None and self._plan.is_rekeyed
        return not self.by_name and (len(self.readers) > 1 or is_rekeyed)

    def refuse_damage(self) -> None:
        """See :class:`RowsSource`."""
        for reader in self.readers:
            refuse_damage(reader)

    def newest(self, findings: RecoveryReport) -> DensePart:
        """See :class:`ModelSource`."""
        live, tables = self.live, list(self.live.tables.values())
        stores, record, part = newest_of_all(self.readers, full=self.full, findings=findings)
        if self.weights_only:
            part = without_optimizers(part)
        part = part.named_as_in(live.model, tables)
        regrouped = Regrouped(part)
        if not self.by_name:
            held = [t for at in stores for t in at.reader.tables.values()]
            stored = {table.name: part_of(table).table for table in held}
            regrouped = regroup(part, stored, live)
            part, self._replicated = regrouped.part, regrouped.replicated
        tables = list(self.tables)
        in_dense = regrouped.in_dense
        self._plan = plan = CopyPlan(
            stores,
            tables,
            by_name=self.by_name,
            in_dense=in_dense,
            weights_only=self.weights_only,
        )
        if plan.is_rekeyed:
            self.refuse_damage()  # rows would fall back to older states, of other ids perhaps
        differences = [
            *plan.differences,
            *regrouped.differences,
            *dense_differences(part, live.model, live.optimizers, tables, live.declared),
        ]
        if self.strict and differences:
            raise StoreError(
                f"'{self.readers[0].directory}' holds another model: {'; '.join(differences)}. "
                "Build the model that the store was made with, or take what matches with "
                "recover(from_store=..., strict=False)"
            )
        if not self.strict and plan.is_empty and not _has_parameter_of(part, live.model):
            raise StoreError(
                f"'{self.readers[0].directory}' and the model have nothing in common, so nothing "
                f"was recovered: {'; '.join(differences[:4])}... Name a store of this model, or "
                "build the model that the store was made with"
            )
        findings.differences = differences
        records = [at.record for at in stores]
        is_one_step = len({each.last_step for each in records}) == 1
        findings.is_complete = is_one_step and all(each.is_complete for each in records)
        # The stores of several processes are of several steps.
        findings.rows_stale = _stale_rows(part, record, differences) if self.by_name else None
        return part

    def copy_rows(self, findings: RecoveryReport) -> None:
        """See :class:`RowsSource`."""
        assert self._plan is not None
        self._plan.copy(findings, direct_io=self.live.direct_io)


def _stale_rows(
    part: DensePart, record: SegmentRecord, differences: Sequence[str] = ()
) -> int | None:
    is_exact = record.is_complete and not differences
    return 0 if is_exact else read_position(part.tree()).rows_unsaved


def _has_parameter_of(part: DensePart, model: nn.Module) -> bool:
    live = model.state_dict(keep_vars=True)
    return any(
        getattr(live.get(name), "shape", None) == getattr(value, "shape", ())
        for name, value in part.tree()["model"].items()
    )
