"""The Checkpointer of a training loop: it tracks changed rows, takes snapshots and recovers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn

from cpr_ext.checkpointer.options import (
    CheckpointerOptions,
    StagingOptions,
    StoreOptions,
    require_schedule,
)
from cpr_ext.checkpointer.parts import (
    Trained,
    choose_tables,
    refuse_several_processes,
    refuse_sharded_models,
)
from cpr_ext.checkpointer.recovery_calls import RecoveryCalls, StorePaths
from cpr_ext.checkpointer.session import Session
from cpr_ext.errors import CprError
from cpr_ext.recovery.recoverer import OnDamage, RecoveryMode
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.runtime.cuda import release_kept
from cpr_ext.runtime.forks import leave_to_parent_when_forked
from cpr_ext.runtime.log_text import html_table, logger_of
from cpr_ext.runtime.termination import EXIT_CODE, OnSigterm, Termination
from cpr_ext.runtime.validation import (
    as_optimizers,
    as_whole_number,
    require_model,
    require_one_of,
    require_path,
)
from cpr_ext.saving.metrics import Metrics
from cpr_ext.saving.priorities import MostFrequentlyUsed, Priority
from cpr_ext.saving.schedules import EverySeconds, Schedule
from cpr_ext.saving.selection import SnapshotKind
from cpr_ext.saving.snapshot_handle import SnapshotHandle
from cpr_ext.state.dense_state import DensePart, require_savable
from cpr_ext.state.position import require_sound
from cpr_ext.state.stateful import as_declared, refuse_saved_twice
from cpr_ext.state.table import Table, as_rows, find_table
from cpr_ext.storage.origin import RemoteStatus
from cpr_ext.tracking.unwatched import (
    require_own_optimizers,
    warn_of_large_parameters,
    warn_of_loaders,
)

logger = logger_of("saving")


class Checkpointer:
    """Prioritized snapshots of a model's embedding tables, and recovery from them.

    Args:
        model: any module with ``nn.Embedding`` or ``nn.EmbeddingBag`` tables.
        optimizers: the optimizer or optimizers of its parameters.
        directory: the store; created if it does not exist.
        priority: which rows a partial snapshot saves first. Default: ``MostFrequentlyUsed(0.125)``.
        schedule: when to take one. Default: ``EverySeconds(60)``.
        num_shards: number of row ranges of every table, each recovered separately.
        tables: parameters or modules by name, instead of those found in ``model``; or a list of
            ready-made ``cpr_ext.Table``, which may be empty: then only the dense part is saved.
            With keyed tables every snapshot is of one step, and captured inside ``step()``.
        state: by name, what else a snapshot holds. Objects with ``state_dict()`` and
            ``load_state_dict()``, such as learning-rate schedulers, ``torch.amp.GradScaler``, a
            reader or an ``AveragedModel``, take their state back in ``recover()``. The result of a
            callable without arguments (plain values and tensors) is in ``RecoveryReport.state``
            after it. ``cpr_ext.PerRank(...)`` around either marks what each process
            of a job has for itself; all else is that of the process that saved last.
        store: what the store keeps, how exactly, and its copy: :class:`cpr_ext.StoreOptions`.
        staging: memory, threads and file access of a snapshot: :class:`cpr_ext.StagingOptions`.
        on_sigterm: ``"save"``: after SIGTERM the step in flight is the last. Its :meth:`step` saves
            all rows, waits until they are durable, closes this object and raises
            ``SystemExit(143)``. For training in one process. None: SIGTERM does what it did.

    Raises:
        UsageError: the model has no tables or is under FSDP, or an option is out of range.
        StoreError: the directory is not a store, holds another model, or is in use.
        StorageError: the directory cannot be made, read or written.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        directory: str | os.PathLike[str],
        *,
        priority: Priority | None = None,
        schedule: Schedule | None = None,
        num_shards: int = 1,
        tables: Mapping[str, torch.Tensor | nn.Module] | Sequence[Table] | None = None,
        state: Mapping[str, Any] | None = None,
        store: StoreOptions = StoreOptions(),  # noqa: B008 - it is frozen
        staging: StagingOptions = StagingOptions(),  # noqa: B008
        on_sigterm: OnSigterm | None = None,
    ) -> None:
        require_model(model)
        require_path("directory", directory)
        settings = CheckpointerOptions(
            MostFrequentlyUsed() if priority is None else priority,
            EverySeconds(60) if schedule is None else schedule,
            num_shards,
            store,
            staging,
        )
        self._termination = Termination(on_sigterm)
        if on_sigterm is not None:
            refuse_several_processes()
        refuse_sharded_models(model)
        self.model = model
        self.optimizers = as_optimizers(optimizers)
        self.tables = choose_tables(model, self.optimizers, tables)
        self.priority = settings.priority
        self.num_shards = settings.num_shards
        require_own_optimizers(model, self.optimizers, self.tables)
        require_savable(model, self.optimizers, self.tables)
        warn_of_large_parameters(model, self.tables)
        #: The state that no model or optimizer has.
        self.declared = as_declared(state)
        refuse_saved_twice(self.declared.objects, model, self.optimizers)
        warn_of_loaders(self.declared.objects)
        trained = Trained(model, self.optimizers, self.tables, settings, self.declared)
        #: What it is made of; workers of a job reach further than others.
        self.session = Session(trained, directory)
        self.store = self.session.store
        self._account = self.session.account
        self._recorder = self.session.recorder
        self._saver = self.session.saver
        self._trackers = self.session.trackers
        self._watch = self.session.watch
        self._guard = self.session.guard
        self._recovery = RecoveryCalls(self.session, self.num_shards)
        self._termination.listen()
        leave_to_parent_when_forked(self)

    @property
    def schedule(self) -> Schedule:
        """When snapshots are taken; it can be replaced during training."""
        return self._account.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        require_schedule(schedule)
        self._account.schedule = schedule

    @property
    def metrics(self) -> Metrics:
        """Counts and costs of checkpointing so far."""
        metrics = self._account.metrics
        if (status := self.remote_status()) is not None:
            metrics.note_remote_lag(status.lag_seconds, status.lag_bytes)
        return metrics

    def remote_status(self) -> RemoteStatus | None:
        """Return how far the copy in object storage is; None without ``remote``."""
        return None if self.store.origin is None else self.store.origin.status()

    @property
    def step_count(self) -> int:
        """Training steps done, including those before a restart."""
        return self._account.step

    @property
    def num_samples(self) -> int:
        """Samples trained, including those before a restart."""
        return self._account.num_samples

    def step(self, num_samples: int = 1) -> SnapshotHandle | None:
        """Mark the end of a training step, after all optimizers; may start or continue saving.

        Args:
            num_samples: samples in the batch; with it, losses are reported in samples, not in
                steps.

        Returns:
            The snapshot that began at this step, if one did.

        Raises:
            UsageError: the store holds snapshots that were not recovered, or this object is closed.
            RowIndexError: the batch looked up a row that its table does not have.
        """
        started = time.perf_counter()
        self._guard.require_recovered()
        num_samples = as_whole_number("num_samples", num_samples, 0)
        self._guard.require_savable()
        require_sound(self.step_count + 1, self.num_samples + num_samples)
        with self._guard.in_call("step()"):
            begun = self.session.step(num_samples, started)
        if self._termination.is_due():
            self._save_and_end()
        return begun

    def save(self, kind: SnapshotKind = "partial") -> SnapshotHandle:
        """Take a snapshot now: capture all of it at this step, and commit it in the background.

        In the middle of a step, the next :meth:`step` takes it. That is so if an optimizer has
        stepped since :meth:`step`, or a signal handler calls this.

        Args:
            kind: ``"partial"`` (selected rows) or ``"base"`` (all rows).

        Returns:
            The snapshot; :meth:`wait` returns once it is durable.
        """
        require_one_of("kind", kind, ("partial", "base"))
        self._guard.require_recovered()
        self._guard.require_savable()
        return self.session.save(kind)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the current snapshot is durable; return False if the time ran out first.

        Raises:
            SnapshotError: it failed; its cause is ``__cause__``.
            UsageError: it is called in the middle of a step, and rows remain to be captured.
        """
        self._guard.require_open()
        return self.session.wait(timeout_seconds)

    def recover(
        self,
        *,
        shards: Sequence[int] | None = None,
        mode: RecoveryMode = "partial",
        from_store: StorePaths | None = None,
        strict: bool = True,
        on_damage: OnDamage = "fall_back",
        up_to_step: int | None = None,
        at_step: int | None = None,
    ) -> RecoveryReport:
        """Restore a lost state.

        Without ``shards``, after a process death, restore every shard, the dense part, random
        number generators and the position. With ``shards``, in a live model, restore only their
        rows.

        Args:
            shards: the lost shards; every other row, and the position, stay unchanged.
            mode: ``"partial"`` resumes from the newest state of every row; ``"full"`` goes back to
                the last full-recovery point, a single step at which all rows were saved.
            from_store: the source if this store is still empty: another store, of any number of
                shards, which is only read. A list: the stores of all processes of a job, each with
                its parts of the tables; they are split like this model's tables, and the dense part
                is the newest. Once this store holds a snapshot, it is ignored. Names may differ in
                the additions of wrappers (``module.``, ``_orig_mod.``, ``_dmp_wrapped_module.``).
            strict: False restores the matching part of ``from_store``: a table that has grown keeps
                its old rows; other tables and parameters that differ stay unchanged.
                ``RecoveryReport.differences`` lists them.
            on_damage: ``"fall_back"`` restores the newest undamaged state of each row; the report
                lists the damage and which rows are older, by how much, or missing. ``"raise"``
                reads and checks all files first (of ``shards``, or of the whole store). If any is
                damaged, it raises before anything is changed.
            up_to_step: use no snapshot of a later step, and drop later ones. 0, for a model that
                starts from step 0: drop all.
            at_step: go back to the full-recovery point of this step, and drop what is newer;
                ``cpr inspect`` lists those that the store keeps.

        Returns:
            A report of the restored state; training resumes from its ``step``, 0 if the store is
            empty.

        Raises:
            UsageError: no such shard, ``shards`` together with ``mode="full"`` or ``from_store``,
                or ``strict=False`` without ``from_store``.
            StoreError: the store does not fit the model (all differences are listed, nothing was
                changed), or holds no full-recovery point.
            DamageError: no undamaged snapshot of the dense part is left; or anything is damaged,
                with ``on_damage="raise"``: names every damaged file, nothing was changed.
            StorageError: a file could not be read, over a few seconds; it may be sound. The store
                is unchanged; the model may be partly restored, so call ``recover()`` again before
                training.
        """
        report = self._recovery.recover(
            shards=shards,
            mode=mode,
            from_store=from_store,
            strict=strict,
            on_damage=on_damage,
            up_to_step=up_to_step,
            at_step=at_step,
        )
        self.session.note_recovered(whole=shards is None)
        return report

    def adopt(self, *, step: int, num_samples: int = 0) -> None:
        """Continue from a checkpoint of another kind, which the caller has loaded by itself.

        The model and its optimizers stay as they are; their position in training is set, and the
        next :meth:`step` saves all rows. Every rank of a job calls it, with the same values.

        Args:
            step, num_samples: the position that was loaded.

        Raises:
            UsageError: the store holds a snapshot, or steps were trained; or no store can hold
                this state.
        """
        step = as_whole_number("step", step, 0)
        num_samples = as_whole_number("num_samples", num_samples, 0)
        require_sound(step, num_samples)
        self._recovery.adopt(step, num_samples)
        self.session.note_recovered(whole=True)

    def replicated_state(self, recovered: RecoveryReport | None = None) -> DensePart:
        """Return the replicated state, for :meth:`load_replicated_state` of another worker.

        It has parameters, optimizers (except those of tables alone), generators, position and
        ``state=``.

        Args:
            recovered: of a recovery after which nothing was trained. The caller has not seen its
                ``state`` yet, so that is passed on instead of the caller's.
        """
        self._guard.require_open()
        return self.session.dense.capture_shared(recovered)

    def load_replicated_state(
        self, part: DensePart, *, generators: bool, buffers: bool = True, samples_lost: int = 0
    ) -> Any:
        """Resume from the state of another worker of the same job; table rows stay unchanged.

        A step in progress is aborted; a snapshot in progress continues.

        Args:
            part: that worker's :meth:`replicated_state`.
            generators: take its random number generators, too.
            buffers: take the buffers of its model, too.
            samples_lost: samples whose effect these rows lost; added to the metrics.

        Returns:
            What the callables of ``state=`` returned there; of ``PerRank``, here.

        Raises:
            StoreError: it trains another model; nothing was changed.
        """
        self._guard.require_recovered()
        return self._recovery.load_replicated_state(
            part, generators=generators, buffers=buffers, samples_lost=samples_lost
        )

    def check(self) -> dict[str, int]:
        """Compare all rows that count as unchanged with hashes of their saved values, now.

        Training does so by itself, in slices of ``step()``, before a snapshot becomes a
        full-recovery point. A row that differs was changed past PyTorch: no such snapshot becomes
        one, and all rows of the table count as changed. Not compared are tables of an optimizer
        that moves rows without a gradient. Waits for the snapshot in flight.

        Returns:
            For each table in which a row differs: the id of the first.

        Raises:
            UsageError: it is called in the middle of a step.
        """
        self._guard.require_recovered()
        return self.session.check()

    @contextmanager
    def writing_rows(self, table: str, row_ids: torch.Tensor) -> Iterator[None]:
        """Write rows of a table inside the block, past its optimizer; these count as changed.

        One use is the first row of an id that gets a slot of a keyed table. After a write without
        it, all rows of the table count as changed; one through ``.data`` is found by :meth:`check`.

        Args:
            table: its name.
            row_ids: (n,) int32 or int64, the rows that the block writes, and no others of the
                table.

        Raises:
            UsageError: no such table, or it has no such row.
        """
        self._guard.require_open()
        given = find_table(self.tables, table)
        rows = as_rows(given, row_ids)
        self._saver.pause()
        with self._watch.writing_rows(given, rows):
            yield

    def close(self, *, save: bool = True) -> None:
        """Save what was trained since, and release all resources. Closing twice is fine.

        It finishes the current snapshot. If training has passed the newest snapshot, or that one
        lacks changed rows, it saves all rows as they are now. This takes as long as a base
        snapshot. In the middle of a step it cannot; a line of the log then reports what is not
        saved. The normal end of a ``with`` block does the same; an exception that leaves it saves
        nothing.

        In a forked child there is nothing to release: it returns at once. After an interruption by
        Ctrl-C it can be called again; until then the store's locks are kept.

        Args:
            save: False saves nothing more.

        Raises:
            SnapshotError: a snapshot failed (such as the last one), no exception reported it, and
                none was committed since.
            StorageError: the operating system reports an error while the locks are released.
        """
        if self._guard.is_closed or self._guard.is_forked:
            return
        self._guard.require_idle("close()")
        try:
            with self._guard.in_call("close()"):
                self.session.finish(save=save)
        finally:
            release_kept()
            self.session.release()
            self._termination.close()
        self.session.raise_unreported()

    def __repr__(self) -> str:
        tables = sum(table.num_embeddings for table in self.tables)
        return (
            f"<Checkpointer of '{self.store.directory}': step {self.step_count}, newest snapshot "
            f"of step {self.metrics.snapshot_step}, {len(self.tables)} tables of {tables:,} rows>"
        )

    def _repr_html_(self) -> str:
        values = {name: value for name, value in vars(self.metrics).items() if name != "parity"}
        return html_table(repr(self)[1:-1], values)

    def __reduce__(self) -> str:
        raise TypeError(
            "a Checkpointer has a store open, so it is neither pickled nor copied; copy the model, "
            "and make a Checkpointer for it where it is used"
        )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if exc_type is None:
                self.close()
            elif not (self._guard.is_closed or self._guard.is_forked):
                has_ended_loader = self._termination.has_ended_loader(exc_value, traceback)
                if has_ended_loader and not self.session.is_past_step:
                    self._save_and_end()
                self._termination.close()
                self.session.abort(is_reported=exc_value is not None)
        except (CprError, SystemExit):
            raise
        except BaseException:  # Ctrl-C, or torch's handler for workers of a loader that ended
            self.session.note_interrupted()
            raise

    def leave_to_parent(self) -> None:
        """Detach in a forked child: the model runs there as if this object did not exist."""
        self._recorder.detach()
        self._watch.detach()
        self._saver.detach()

    def _save_and_end(self) -> NoReturn:
        self.save("base")
        self.wait()
        self.close()
        logger.warning("SIGTERM: all rows of step %d are saved, training ends", self.step_count)
        raise SystemExit(EXIT_CODE)

    def _release(self) -> None:
        self.session.release()
