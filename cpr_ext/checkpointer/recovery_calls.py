"""How ``Checkpointer.recover()`` reaches the recoverer, and what changes after a recovery."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from cpr_ext._native import native
from cpr_ext.checkpointer.session import Session
from cpr_ext.errors import CprError, DamageError, UntrackedChangeWarning, UsageError
from cpr_ext.recovery.recoverer import OnDamage, RecoveryMode, settle_slots
from cpr_ext.recovery.report import RecoveryReport, StateSource, age_of
from cpr_ext.recovery.restore import LiveModel, read_dense
from cpr_ext.recovery.sources import OtherStores
from cpr_ext.recovery.verify import check_segment
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.runtime.validation import as_shards, require_model, require_one_of
from cpr_ext.state.dense_schema import read_position
from cpr_ext.state.dense_state import DensePart, restore_dense
from cpr_ext.state.table import Table, find_tables, register_tables, shard_row_range
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.store import Store
from cpr_ext.storage.store_reader import StoreReader, read_committed_all

logger = logger_of("recovery")


class Healing:
    """Reads damaged segments from the copy; without a copy, it does nothing."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def heal_headers(self) -> None:
        """Heal missing files, damaged headers, and damaged dense parts.

        A recovery that met a damaged dense part would roll the store back.
        """
        self._heal_what_fails(
            lambda reader, record: (
                read_dense(reader, record) if record.kind == "dense" else reader.open(record)
            )
        )

    def heal_all(self) -> bool:
        """Read every byte of the store, and heal what is damaged; True: something was."""
        return self._heal_what_fails(check_segment)

    def heal_rows(self, findings: RecoveryReport) -> bool:
        """Heal files in which a recovery found damaged rows; True: recover again."""
        paths = {damaged.path for damaged in findings.damaged_segments}
        records = self._store.manifest.records()
        return self._heal([each for each in records if self._store.path_of(each) in paths])

    def _heal_what_fails(self, check: Callable[[StoreReader, SegmentRecord], Any]) -> bool:
        if self._store.origin is None:
            return False
        reader, damaged = self._store.view(), []
        for record in reader.manifest.records():
            try:
                check(reader, record)
            except DamageError:
                damaged.append(record)
        return self._heal(damaged)

    def _heal(self, damaged: Sequence[SegmentRecord]) -> bool:
        healed, origin = 0, self._store.origin
        if origin is None:
            return False
        for record in damaged:
            path = self._store.path_of(record)
            try:
                if origin.fetch(record, path):
                    healed += 1
                    logger.warning("%s was damaged; it was read from the remote store", path)
            except (CprError, OSError) as error:  # recovery falls back, as without a copy
                logger.warning("%s could not be read from the remote store: %s", path, error)
        return healed > 0


StorePaths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class RecoveryCalls:
    """Checks a call of ``recover()``, makes it, and accounts for it."""

    def __init__(self, session: Session, num_shards: int) -> None:
        self._account = session.account
        self._rebase = session.rebase
        self._dense = session.dense
        self._healing = Healing(session.store)
        self._recorder = session.recorder
        self._recoverer = session.recoverer
        self._saver = session.saver
        self._store = session.store
        self._watch = session.watch
        self._inventory = session.inventory
        self._guard = session.guard
        self._num_shards = num_shards
        self._has_recovered = False  # all of the state

    def recover(
        self,
        *,
        shards: Sequence[int] | None,
        mode: RecoveryMode,
        from_store: StorePaths | None,
        strict: bool,
        on_damage: OnDamage,
        up_to_step: int | None,
        at_step: int | None,
    ) -> RecoveryReport:
        """Restore a lost state; see :meth:`cpr_ext.Checkpointer.recover`."""
        require_one_of("mode", mode, ("partial", "full"))
        require_one_of("on_damage", on_damage, ("raise", "fall_back"))
        self._guard.require_open()
        self._store.require_in_place()
        started = time.perf_counter()
        _refuse_contradictions(shards, mode, from_store, strict, up_to_step, at_step)
        lost = None if shards is None else as_shards(shards, self._num_shards)
        with self._guard.in_call("recover()"):
            self._saver.quiesce()
            self._inventory.follow_structure(self._watch)
            self._healing.heal_headers()
            if lost is not None:
                report = self._healed(partial(self._recover_shards, lost, on_damage), on_damage)
                report.source = self._own_source()
            elif from_store is not None and self._store.is_empty:
                report = self._recover_from(from_store, mode, strict=strict, on_damage=on_damage)
            else:
                recover_all = partial(
                    self._recoverer.recover_all,
                    mode,
                    steps_done=self._account.step,
                    on_damage=on_damage,
                    up_to_step=up_to_step,
                    at_step=at_step,
                )
                report = self._healed(recover_all, on_damage)
                if self._healing.heal_rows(report):
                    report = recover_all()
                report.source = self._own_source()
                self._note_all(report, is_own_store=True)
        report.seconds = time.perf_counter() - started
        self._note_damage(report)
        self._account.note_recovery(report.seconds, report.bytes_read, of_shards=lost is not None)
        _log(report, lost)
        return report

    def adopt(self, step: int, num_samples: int) -> None:
        """Take the model as it is for that of a position in training."""
        self._guard.require_open()
        if not self._store.is_empty or self._account.step:
            where = (
                f"'{self._store.directory}' holds snapshots"
                if not self._store.is_empty
                else (f"{self._account.step} steps are trained")
            )
            raise UsageError(
                f"adopt() is for a job that begins: {where}. Call it once, before the first "
                "step(), with an empty directory; later starts call recover() alone"
            )
        with self._guard.in_call("adopt()"):
            self._dense.capture()  # which refuses what could not be read again
            self._recorder.forget()
            self._note_all(RecoveryReport(step, num_samples, ()), is_own_store=False)

    def _note_damage(self, report: RecoveryReport) -> None:
        """Count what damage took as lost in the report, in the metrics and in the log."""
        if report.damage is None:
            return
        num_rows = sum(table.num_embeddings for table in self._recoverer.tables)
        samples_lost = report.samples_of_damage(num_rows, self._num_shards)
        self._account.note_damage(report.rows_damaged, samples_lost)
        logger.warning(
            "%s: %s. Save a base snapshot soon, and see 'cpr verify'",
            *(self._store.directory, report.damage),
        )
        report.samples_lost += samples_lost
        report.row_updates_lost = None

    def _own_source(self) -> StateSource | None:
        """Return where the state comes from that this store has; None: it has none."""
        if (newest := self._store.manifest.newest) is None:
            return None
        age, origin = age_of(self._store.path_of(newest)), self._store.origin
        if origin is None or not origin.read_from:
            return StateSource("own store", str(self._store.directory), age)
        source = StateSource("copy", origin.read_from, age)
        origin.read_from = ""  # from now on it is this store's own
        logger.warning(
            "'%s' was empty: training resumes from the %s. What was trained after that is lost; "
            "how much, the copy does not show",
            *(self._store.directory, source),
        )
        return source

    def _healed(self, recover: Callable[[], RecoveryReport], on_damage: OnDamage) -> RecoveryReport:
        """Recover; if damage was refused, which changed nothing, heal it and recover again."""
        try:
            return recover()
        except DamageError:
            if on_damage != "raise" or not self._healing.heal_all():
                raise
        return recover()

    def load_replicated_state(
        self, part: DensePart, *, generators: bool, buffers: bool, samples_lost: int
    ) -> Any:
        """Resume from the state of another worker of the same job."""
        self._saver.pause()
        own_step, own_values = self._account.step, self._own_values()
        position = self._dense.restore_shared(part, generators=generators, buffers=buffers)
        declared = self._dense.declared
        # A ResumableLoader gives the batch of any later step.
        fixed = [n for n in declared.own if not hasattr(declared.objects.get(n), "batch_of")]
        if self._has_recovered and own_step != position.step and fixed:
            text = (
                f"PerRank state of this process, {sorted(fixed)}, is of step {own_step}; training "
                f"resumes at step {position.step}. A reader may give some samples again, or leave "
                "some out. PerRank(cpr_ext.wings.callbacks.loops.ResumableLoader(reader)) does not"
            )
            warnings.warn(text, UntrackedChangeWarning, stacklevel=4)
        self._watch.begin_step()
        self._watch.changes.versions.read()
        self._recorder.begin_step()
        self._account.resume_at(position.step, position.num_samples)
        self._account.note_lost_samples(samples_lost)
        return declared.shared_values(position.values) | own_values

    def _own_values(self) -> dict[str, Any]:
        """Return this process's own values: as recovered, if nothing was trained since."""
        declared = self._dense.declared
        recovered = self._recoverer.position
        is_fresh = self._has_recovered and recovered.step == self._account.step
        return declared.own_values(recovered.values if is_fresh else self._dense.values())

    def _recover_shards(self, lost: Sequence[int], on_damage: OnDamage) -> RecoveryReport:
        def lost_rows(table: Table) -> list[tuple[int, int]]:
            rows = table.num_embeddings
            return [shard_row_range(rows, shard, self._num_shards) for shard in lost]

        self._recorder.flush()
        self._watch.changes.accept_loss(lost_rows, self._saver.claims.hashes.are_unchanged)
        self._watch.changes.settle()  # what changed outside is not saved, and counts as lost
        account = self._account
        findings = self._recoverer.recover_shards(
            lost,
            step=account.step,
            num_samples=account.num_samples,
            on_damage=on_damage,
            counts_are_exact=self._watch.changes.counts_are_exact,
        )
        self._watch.changes.versions.read()
        self._saver.claims.restart(lost_rows)
        if findings.damaged_segments:
            # Rows that kept an older state count as saved; only a base snapshot saves them again.
            self._rebase.forget_base()
        findings.samples_lost = account.note_shards_recovered(
            findings.shards, findings.row_updates_lost
        )
        return findings

    def _recover_from(
        self, from_store: StorePaths, mode: RecoveryMode, *, strict: bool, on_damage: OnDamage
    ) -> RecoveryReport:
        by_name = isinstance(from_store, str | os.PathLike)

        def read(readers: list[StoreReader]) -> RecoveryReport:
            return self._recoverer.recover_from(
                readers, mode, by_name=by_name, strict=strict, on_damage=on_damage
            )

        stores = [from_store] if isinstance(from_store, str | os.PathLike) else from_store
        if not stores:
            raise UsageError("from_store is an empty list; needed: the stores of all processes")
        findings = read_committed_all(stores, read, lambda found: not found.damaged_segments)
        findings.source = StateSource("other stores", ", ".join(map(str, stores)))
        self._note_all(findings, is_own_store=False)
        return findings

    def _note_all(self, findings: RecoveryReport, *, is_own_store: bool) -> None:
        """Record that everything was restored: training resumes from the position found."""
        self._account.note_all_recovered(
            findings.step, findings.num_samples, self._recoverer.position.samples_lost
        )
        self._watch.changes.forget()
        self._watch.begin_step()
        self._saver.claims.restart()
        self._saver.due.restart_interval()
        self._guard.may_train = self._has_recovered = True
        # Of another store nothing is in this one yet: the next step() takes a base snapshot.
        if is_own_store and not self._store.is_empty:
            self._rebase.note_recovered()
            if findings.damaged_segments:
                self._rebase.forget_base()


def _refuse_contradictions(
    shards: Sequence[int] | None,
    mode: RecoveryMode,
    from_store: StorePaths | None,
    strict: bool,
    up_to_step: int | None,
    at_step: int | None,
) -> None:
    """Refuse options that contradict each other."""
    if shards is not None and mode == "full":
        raise UsageError('full recovery goes back with all shards; leave out "shards"')
    if shards is not None and from_store is not None:
        raise UsageError('from_store is for all shards; leave out "shards"')
    if up_to_step is not None and (shards is not None or from_store is not None):
        raise UsageError("up_to_step goes with neither shards nor from_store")
    others = (shards, from_store, up_to_step)
    if at_step is not None and any(option is not None for option in others):
        raise UsageError("at_step goes with none of shards, from_store and up_to_step")
    if not strict and from_store is None:
        raise UsageError("strict=False needs from_store; a store is written by one model only")


def _log(report: RecoveryReport, lost: Sequence[int] | None) -> None:
    logger.info(
        "recovered %s at step %d: %d rows in %.2f s, %s of them stale; from %s",
        "everything" if lost is None else f"shards {', '.join(map(str, lost))}",
        report.step,
        report.rows_restored,
        report.seconds,
        "an unknown number" if report.rows_stale is None else report.rows_stale,
        report.source or "nothing: the store is empty",
    )
    for damaged in report.damaged_segments:
        logger.warning("damaged segment %s: %s", damaged.path, damaged.reason)


_Path = str | os.PathLike[str]


def load_into(
    model: nn.Module,
    store: _Path | Sequence[_Path],
    *,
    tables: Mapping[str, torch.Tensor | nn.Module] | Sequence[Table] | None = None,
    mode: RecoveryMode = "partial",
    strict: bool = True,
) -> RecoveryReport:
    """Load a store's newest snapshot into a model, without its optimizers, for evaluation.

    The store is only read, also while a job trains. Generators stay as they are.

    Args:
        model: as in the job; of a job of several processes, the model that is not sharded.
        store: the directory; a list: the stores of all processes, whose parts are joined.
        tables: as in :class:`cpr_ext.Checkpointer`; None: the embeddings of the model.
        mode: ``"full"`` loads the newest full-recovery point, a single step.
        strict: False loads what matches; the report's ``differences`` list the rest.

    Returns:
        Its step, and which rows are damaged or missing.

    Raises:
        StoreError: it is no store, or of another model; nothing was changed.
        DamageError: no undamaged dense part is left.
        StorageError: a file could not be read; the model may be partly loaded.
    """
    require_model(model)
    require_one_of("mode", mode, ("partial", "full"))
    by_name = isinstance(store, str | os.PathLike)
    stores = [store] if isinstance(store, str | os.PathLike) else list(store)
    if not stores:
        raise UsageError("store is an empty list; needed: the stores of all processes")
    started = time.perf_counter()
    found = find_tables(model) if tables is None else register_tables(tables, ())
    threads = native.ThreadPool(num_threads=min(4, os.cpu_count() or 1))
    live = LiveModel(model, (), {table.name: table for table in found}, threads, direct_io=True)

    def read(readers: list[StoreReader]) -> RecoveryReport:
        source = OtherStores(readers, live, mode == "full", by_name, strict, weights_only=True)
        findings = RecoveryReport()
        part = source.newest(findings)
        position = read_position(part.tree())
        restore_dense(part, model, (), source.tables, strict=strict, generators=False)
        findings.step, findings.num_samples = position.step, position.num_samples
        findings.state = position.values
        findings.row_updates_lost = 0 if findings.rows_stale == 0 else None
        source.copy_rows(findings)
        for table in found:
            if table.slots is not None:
                settle_slots(table, [(0, table.num_embeddings)], findings)
        return findings

    findings = read_committed_all(stores, read, lambda result: not result.damaged_segments)
    findings.source = StateSource("other stores", ", ".join(map(str, stores)))
    findings.seconds = time.perf_counter() - started
    return findings
