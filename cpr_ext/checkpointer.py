"""The Checkpointer of a training loop: it tracks changed rows, takes snapshots and recovers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from cpr_ext._native import native
from cpr_ext.cuda import devices_of, make_stagers, use_training_streams
from cpr_ext.errors import SnapshotError, UsageError
from cpr_ext.metrics.cost_meter import CostMeter
from cpr_ext.metrics.counters import Metrics, ScalarWriter
from cpr_ext.metrics.run_state import RunAccount
from cpr_ext.priorities import LargestChange, MostFrequentlyUsed, Priority, make_tracker
from cpr_ext.recovery.recoverer import OnDamage, Recoverer, RecoveryMode
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.runtime.forks import Creator, leave_to_parent_when_forked
from cpr_ext.runtime.log_text import EncodableMessages
from cpr_ext.saving.background_capture import Overlap, OverlapChoice
from cpr_ext.saving.rebase_policy import BaseRule
from cpr_ext.saving.requested_snapshot import RequestedSnapshot
from cpr_ext.saving.saver import Consistency, Saver, SavingOptions, WhenBusy
from cpr_ext.saving.segment_capture import WriteOptions
from cpr_ext.saving.selection import Selector
from cpr_ext.saving.slot_size import DEFAULT_SLOT_BYTES, choose_slot_bytes
from cpr_ext.saving.snapshot import Snapshot, SnapshotKind
from cpr_ext.schedules.intervals import EverySeconds, Schedule
from cpr_ext.state.dense_schema import read_position
from cpr_ext.state.dense_state import (
    DensePart,
    capture_dense,
    refuse_nan,
    restore_dense,
    shared_optimizers,
)
from cpr_ext.state.table import (
    Table,
    find_tables,
    prioritized_tables,
    register_tables,
    shard_row_range,
)
from cpr_ext.storage.commit_thread import Committer
from cpr_ext.storage.compactor import make_compactor
from cpr_ext.storage.reading import OnReadError, falling_back
from cpr_ext.storage.retention import Retention
from cpr_ext.storage.store import Store
from cpr_ext.storage.store_reader import StoreReader, read_committed_all
from cpr_ext.tracking.lookup_recorder import LookupRecorder
from cpr_ext.tracking.table_watch import TableWatch
from cpr_ext.tracking.unwatched import (
    require_own_optimizers,
    warn_of_large_parameters,
    warn_of_schedulers,
    warn_of_sparse_gradients,
)
from cpr_ext.validation import (
    as_optimizers,
    as_shards,
    as_whole_number,
    require_callable_or_none,
    require_kind,
    require_one_of,
    require_positive_or_none,
)

logger = logging.getLogger("cpr_ext")
logger.addFilter(EncodableMessages())

__all__ = ["DEFAULT_KEEP_BYTES", "DEFAULT_SLOT_BYTES", "Checkpointer"]

DEFAULT_KEEP_BYTES = 32 << 20
# Counting the rows that are not saved reads every counter, while training waits.
_MOST_COUNTED_ROWS = 2_000_000
_MID_STEP = (
    "{call} in the middle of step {step}: an optimizer has stepped since step(), so the state to "
    "capture is past that step. Call it after step()"
)


class Checkpointer:
    """Prioritized snapshots of a model's embedding tables, and recovery from them.

    Args:
        model: any module with ``nn.Embedding`` or ``nn.EmbeddingBag`` tables.
        optimizers: the optimizer or optimizers of its parameters.
        directory: the store; created if it does not exist.
        priority: which rows a partial snapshot saves first.
        schedule: when to take one.
        consistency: ``"row"`` captures a snapshot over several steps, so that the pause at any one
            step is bounded; ``"step"`` captures all of it as of one step. That is the step at which
            it is due or, while capture overlaps training, the one after its rows were chosen.
        overlap: ``"auto"`` captures on a background thread while forward and backward run, which
            only read the tables. With ``consistency="step"``, it first copies rows that are
            about to change. It is for tables that only their optimizer changes: another change is
            detected (unless ``.data`` hides it from PyTorch) and costs the snapshot. Tables of less
            than 16 MB, on a GPU, or without a torch optimizer, are captured inside ``step()``, as
            are all with ``"never"``; so are snapshots of one step if an optimizer changes rows that
            were not looked up. ``"always"`` overlaps small tables too, and raises where it cannot.
        num_shards: number of row ranges of every table, each recovered separately.
        tables: parameters or modules by name, instead of those found in ``model``; or a list of
            ready-made ``cpr_ext.Table``, which may be empty: then only the dense part is saved.
        extra_state: called for each snapshot; its result (plain values and tensors) is saved with
            the snapshot and returned as ``RecoveryReport.extra_state``.
        rebase_after: take a base snapshot instead of a partial one once partial snapshots have
            written this many times the bytes of the last base, so that disk use and recovery time
            stay bounded; None: never.
        compact_after: merge a shard's partial segments, in the background, once they hold this many
            times the bytes of its base; partial snapshots then need no new base. None: never.
        compact_bytes_per_second: the most that compaction reads and writes; None: no limit.
        retention: how many full-recovery points to keep, and how many bytes in all: a
            ``cpr_ext.Retention``.
        when_busy: what to do when a snapshot is due before the last one is committed: ``"delay"``
            starts it after that commit, ``"wait"`` blocks training until then, so that snapshots
            are taken at the same steps whatever the disk's speed.
        on_nan: ``"raise"`` aborts a snapshot rather than save NaN; ``"save"`` saves it.
        slot_bytes, num_slots: size and number of the staging slots, the memory of a snapshot; every
            GPU that has tables needs the same amount. None: 8 MB, or more if a table's rows need
            it.
        keep_bytes: limit of the memory for rows copied before they change; when it is full,
            training waits for the disk.
        num_threads: threads for counting, selecting and copying, the caller's included.
        direct_io: bypass the page cache where the file system allows it.
        count_row_updates: count updates row by row (4 bytes each), so that metrics report how many
            were lost. ``MostFrequentlyUsed`` always does.
        scalar_writer: the metrics are written to it after each snapshot and recovery; anything
            with ``add_scalar(tag, value, step)``, such as TensorBoard's ``SummaryWriter``.

    Raises:
        UsageError: the model has no tables, or an option is out of range.
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
        consistency: Consistency = "row",
        num_shards: int = 1,
        tables: Mapping[str, torch.Tensor | nn.Module] | Sequence[Table] | None = None,
        extra_state: Callable[[], Any] | None = None,
        rebase_after: float | None = 4.0,
        compact_after: float | None = None,
        compact_bytes_per_second: float | None = None,
        retention: Retention | None = None,
        when_busy: WhenBusy = "delay",
        on_nan: Literal["raise", "save"] = "raise",
        overlap: OverlapChoice = "auto",
        slot_bytes: int | None = None,
        keep_bytes: int = DEFAULT_KEEP_BYTES,
        num_slots: int = 3,
        num_threads: int | None = None,
        direct_io: bool = True,
        count_row_updates: bool = False,
        scalar_writer: ScalarWriter | None = None,
    ) -> None:
        require_one_of("consistency", consistency, ("row", "step"))
        require_one_of("when_busy", when_busy, ("delay", "wait"))
        require_one_of("on_nan", on_nan, ("raise", "save"))
        require_one_of("overlap", overlap, ("auto", "always", "never"))
        require_positive_or_none("rebase_after", rebase_after)
        require_positive_or_none("compact_after", compact_after)
        require_positive_or_none("compact_bytes_per_second", compact_bytes_per_second)
        num_shards = as_whole_number("num_shards", num_shards, 1)
        num_slots = as_whole_number("num_slots", num_slots, 1)
        if num_threads is not None:
            num_threads = as_whole_number("num_threads", num_threads, 1, ", or None")
        require_callable_or_none("extra_state", extra_state)
        require_kind("priority", priority, Priority, "MostFrequentlyUsed(0.125)")
        require_kind("schedule", schedule, Schedule, "EverySteps(500)")
        if isinstance(priority, LargestChange) and on_nan == "save":
            raise UsageError('LargestChange cannot rank NaN rows; use on_nan="raise" with it')
        self.model = model
        self.optimizers = as_optimizers(optimizers)
        self.tables = (
            find_tables(model, self.optimizers)
            if tables is None
            else register_tables(tables, self.optimizers)
        )
        if not self.tables and (tables is None or isinstance(tables, Mapping)):
            raise UsageError(
                "the model has no nn.Embedding or nn.EmbeddingBag; give its tables by name: "
                'Checkpointer(..., tables={"name": parameter})'
            )
        require_own_optimizers(model, self.optimizers, self.tables)
        warn_of_large_parameters(model, self.tables)
        overlaps = Overlap.is_wanted(overlap, self.tables)
        slot_bytes = choose_slot_bytes(slot_bytes, self.tables)
        self.priority = MostFrequentlyUsed() if priority is None else priority
        self.consistency: Consistency = consistency
        self.num_shards = num_shards
        self._extra_state = extra_state
        self._refuses_nan = on_nan == "raise"
        self._devices = devices_of(table.weight for table in self.tables)
        use_training_streams(self._devices)
        self._stagers = make_stagers(self._devices, slot_bytes=slot_bytes, num_slots=num_slots)
        threads = native.ThreadPool(num_threads=num_threads or min(4, os.cpu_count() or 1))
        prioritized = {table.name for table in prioritized_tables(self.tables)}
        self._trackers = {
            table.name: make_tracker(
                self.priority, table, table.name in prioritized, count_updates=count_row_updates
            )
            for table in self.tables
        }
        meter = CostMeter(self.tables, prioritized, self.priority.fraction, num_shards)
        self._account = RunAccount(
            meter, EverySeconds(60) if schedule is None else schedule, num_shards, scalar_writer
        )
        pipeline = native.SnapshotPipeline(
            num_slots=num_slots,
            slot_bytes=slot_bytes,
            copy_on_write_bytes=keep_bytes,
            pool=threads,
            stagers=self._stagers,
        )
        self.store = Store(
            directory, tables=self.tables, num_shards=num_shards, retention=retention
        )
        self._recorder = LookupRecorder(self.tables, list(self._trackers.values()), threads)
        self._watch = TableWatch(self.tables, self.optimizers, self._trackers, threads)
        self._recoverer = Recoverer(
            model,
            self.optimizers,
            self.tables,
            self.store,
            self._trackers,
            self._recorder,
            threads,
            direct_io=direct_io,
        )
        committer = Committer()
        self._base_rule = BaseRule(self.store, self.tables, rebase_after)
        self._saver = Saver(
            self.store,
            self.tables,
            self._trackers,
            Selector(
                self.tables,
                self._trackers,
                self.priority,
                prioritized,
                num_shards,
                threads,
                self._watch.is_proven,
                self._watch.has_kept_still,
            ),
            pipeline,
            self._account,
            self._base_rule,
            committer,
            self._watch,
            overlap=Overlap(self.tables, self._watch, self._recorder) if overlaps else None,
            compactor=make_compactor(
                self.store,
                committer,
                self.tables,
                after=compact_after,
                bytes_per_second=compact_bytes_per_second,
            ),
            capture_dense=self._capture_dense,
            options=SavingOptions(
                consistency,
                when_busy,
                WriteOptions(direct_io, refuse_nan=self._refuses_nan),
                chooses_all=self.priority.fraction >= 1,
                on_gpu=bool(self._devices),
            ),
        )
        self._recorder.attach()  # last: what fails above leaves the model as it was
        self._watch.attach()
        self._may_train = self.store.is_empty
        self._is_first_step = True
        self._is_busy = False  # inside a call: a signal's handler may make another one
        self._requested: RequestedSnapshot | None = None
        self._closed = False
        self._creator = Creator()
        leave_to_parent_when_forked(self)

    @property
    def schedule(self) -> Schedule:
        """When snapshots are taken; it can be replaced during training."""
        return self._account.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self._account.schedule = schedule

    @property
    def metrics(self) -> Metrics:
        """Counts and costs of checkpointing so far."""
        return self._account.metrics

    @property
    def step_count(self) -> int:
        """Training steps done, including those before a restart."""
        return self._account.step

    @property
    def num_samples(self) -> int:
        """Samples trained, including those before a restart."""
        return self._account.num_samples

    def step(self, num_samples: int = 1) -> Snapshot | None:
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
        self._require_recovered()
        num_samples = as_whole_number("num_samples", num_samples, 0)
        self._require_true()
        with self._in_call("step()"):
            return self._step(num_samples, started)

    def _step(self, num_samples: int, started: float) -> Snapshot | None:
        if self._is_first_step:
            self._is_first_step = False
            warn_of_sparse_gradients(self.model, self.tables)
            if self._extra_state is None:
                warn_of_schedulers(self.optimizers)
        self._saver.pause()
        self._recorder.flush()
        self._recorder.begin_step()
        self._watch.begin_step()
        self._account.go_on_from(self.step_count + 1, self.num_samples + num_samples)
        self._saver.settle()
        begun = self._take_requested() or self._saver.begin_if_due()
        self._saver.go_on()
        self._account.note_step(
            num_samples,
            time.perf_counter() - started + self._saver.take_held_seconds(),
            is_saving=self._saver.in_flight is not None,
            row_updates=self._recorder.num_lookups + self._watch.num_row_updates,
        )
        return begun

    def save(self, kind: SnapshotKind = "partial") -> Snapshot | RequestedSnapshot:
        """Take a snapshot now: capture all of it at this step, and commit it in the background.

        In the middle of a step, the next :meth:`step` takes it. That is so if an optimizer has
        stepped since :meth:`step`, or a signal handler calls this.

        Args:
            kind: ``"partial"`` (selected rows) or ``"base"`` (all rows).

        Returns:
            The snapshot; :meth:`wait` returns once it is durable.
        """
        require_one_of("kind", kind, ("partial", "base"))
        self._require_recovered()
        self._require_true()
        if self._is_mid_step:
            if self._requested is None:
                self._requested = RequestedSnapshot(kind)
            elif kind == "base":
                self._requested.kind = kind
            return self._requested
        with self._in_call("save()"):
            return self._save(kind)

    def _save(self, kind: SnapshotKind) -> Snapshot:
        self._saver.pause()
        self._recorder.flush()
        return self._saver.take(kind)

    def _take_requested(self) -> Snapshot | None:
        request, self._requested = self._requested, None
        if request is None:
            return None
        request.snapshot = self._save(request.kind)
        return request.snapshot

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the current snapshot is durable; return False if the time ran out first.

        Raises:
            SnapshotError: it failed; its cause is ``__cause__``.
            UsageError: it is called in the middle of a step, and rows remain to be captured.
        """
        self._require_open()
        if self._requested is not None or (self._is_mid_step and self._needs_step):
            raise UsageError(_MID_STEP.format(call="wait()", step=self.step_count + 1))
        with self._in_call("wait()"):
            return self._wait(timeout_seconds)

    def _wait(self, timeout_seconds: float | None) -> bool:
        started = time.monotonic()
        if timeout_seconds is None:
            self._saver.advance()
        else:
            self._saver.advance_for(timeout_seconds)
        snapshot = self._saver.in_flight
        if snapshot is None:
            return True
        if timeout_seconds is not None:
            timeout_seconds = max(0.0, timeout_seconds - (time.monotonic() - started))
        if not snapshot.wait_until_done(timeout_seconds):
            return False
        self._saver.settle(warn=False)
        if snapshot.error is not None:
            self._saver.unreported = None
            raise SnapshotError(f"snapshot {snapshot.number} failed") from snapshot.error
        return True

    def recover(
        self,
        *,
        shards: Sequence[int] | None = None,
        mode: RecoveryMode = "partial",
        from_store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        strict: bool = True,
        on_damage: OnDamage = "fall_back",
        on_read_error: OnReadError = "raise",
        up_to_step: int | None = None,
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
            on_read_error: treatment of files that the operating system refuses to read, after
                retries over a few seconds; they may be undamaged. ``"raise"``: StorageError, and
                the store stays unchanged. ``"fall_back"``: an older state is used as after damage,
                and reported; unreadable files stay until a newer snapshot of all rows is durable.
            up_to_step: use no snapshot of a later step, and drop later ones. 0, for a model that
                starts from step 0: drop all.

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
            StorageError: a file could not be read. The store is unchanged; the model may be partly
                restored, so call ``recover()`` again before training.
        """
        require_one_of("on_read_error", on_read_error, ("raise", "fall_back"))
        if on_read_error == "fall_back":
            with falling_back():
                return self.recover(
                    shards=shards,
                    mode=mode,
                    from_store=from_store,
                    strict=strict,
                    on_damage=on_damage,
                    up_to_step=up_to_step,
                )
        require_one_of("mode", mode, ("partial", "full"))
        require_one_of("on_damage", on_damage, ("raise", "fall_back"))
        self._require_open()
        self.store.require_in_place()
        started = time.perf_counter()
        if shards is not None and mode == "full":
            raise UsageError('full recovery goes back with all shards; leave out "shards"')
        lost = None if shards is None else as_shards(shards, self.num_shards)
        if shards is not None and from_store is not None:
            raise UsageError('from_store is for all shards; leave out "shards"')
        if up_to_step is not None and (shards is not None or from_store is not None):
            raise UsageError("up_to_step goes with neither shards nor from_store")
        if not strict and from_store is None:
            raise UsageError("strict=False needs from_store; a store is written by one model only")
        with self._in_call("recover()"):
            self._saver.quiesce()
            report = self._recover(
                lost, mode, from_store, strict=strict, on_damage=on_damage, up_to_step=up_to_step
            )
        report.seconds = time.perf_counter() - started
        self._account.note_recovery(report.seconds, report.bytes_read, of_shards=shards is not None)
        for damaged in report.damaged_segments:
            logger.warning("damaged segment %s: %s", damaged.path, damaged.reason)
        return report

    def _recover(
        self,
        lost: Sequence[int] | None,
        mode: RecoveryMode,
        from_store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
        *,
        strict: bool,
        on_damage: OnDamage,
        up_to_step: int | None,
    ) -> RecoveryReport:
        if lost is not None:
            self._recorder.flush()
            self._watch.check_loss(
                lambda table: [
                    shard_row_range(table.num_embeddings, shard, self.num_shards) for shard in lost
                ]
            )
            self._watch.settle()  # what changed outside is not saved, and counts as lost
            report = RecoveryReport(self.step_count, self.num_samples, tuple(lost))
            self._recoverer.recover_shards(report, on_damage=on_damage)
            self._watch.accept()
            self._saver.forget_saved_rows()
            self._note_shards(report)
        elif from_store is not None and self.store.is_empty:
            report = self._recover_from(from_store, mode, strict=strict, on_damage=on_damage)
            self._note_all(report, is_own_store=False)
        else:
            report = self._recoverer.recover_all(
                mode, steps_done=self.step_count, on_damage=on_damage, up_to_step=up_to_step
            )
            self._note_all(report, is_own_store=True)
        return report

    def shared_part(self, recovered: RecoveryReport | None = None) -> DensePart:
        """Return a snapshot of the replicated state, for :meth:`take_over` of another worker.

        It has parameters, optimizers (except those of tables alone), generators, position and extra
        state.

        Args:
            recovered: of a recovery after which nothing was trained. The caller has not seen its
                extra state yet, so that state is passed on instead of the caller's.
        """
        self._require_open()
        position = self._position()
        if recovered is not None and (recovered.step > 0 or recovered.extra_state is not None):
            position["extra_state"] = recovered.extra_state
        optimizers = shared_optimizers(self.optimizers, self.tables)
        return capture_dense(self.model, optimizers, self.tables, position)

    def take_over(self, part: DensePart, *, generators: bool, samples_lost: int = 0) -> Any:
        """Resume from the state of another worker of the same job; table rows stay unchanged.

        A step in progress is aborted; a snapshot in progress continues.

        Args:
            part: that worker's :meth:`shared_part`.
            generators: take its random number generators, too.
            samples_lost: samples whose effect these rows lost; added to the metrics.

        Returns:
            That worker's extra state.

        Raises:
            StoreError: it trains another model; nothing was changed.
        """
        self._require_recovered()
        self._saver.pause()
        position = read_position(part.tree())
        optimizers = shared_optimizers(self.optimizers, self.tables)
        restore_dense(part, self.model, optimizers, self.tables, generators=generators)
        self._watch.begin_step()
        self._watch.accept()
        self._recorder.begin_step()
        self._account.go_on_from(position.step, position.num_samples)
        self._account.note_lost_samples(samples_lost)
        return position.extra_state

    def record_lookups(self, table: str, indices: torch.Tensor) -> None:
        """Report rows of a table that no torch optimizer updates; they have changed, or will.

        Gradients show which rows a torch optimizer changes, so its tables do not need this.
        """
        self._recorder.record(table, indices)
        self._watch.expect(next(t for t in self.tables if t.name == table))

    @contextmanager
    def tracking_paused(self) -> Iterator[None]:
        """Count no lookups of fused tables (TorchRec) inside the block, which changes no row."""
        with self._recorder.paused():
            yield

    def close(self) -> None:
        """Finish the current snapshot and release all resources. Closing twice is fine.

        In a forked child there is nothing to release: it returns at once. After an interruption by
        Ctrl-C it can be called again; until then the store's locks are kept.

        Raises:
            SnapshotError: a snapshot failed, no exception reported it, and none was committed
                since.
            StorageError: the operating system reports an error while the locks are released.
        """
        if self._closed or not self._creator.is_this_process:
            return
        if self._is_busy:
            raise UsageError("close() from a signal's handler while another call is being made")
        try:
            with self._in_call("close()"):
                if self._is_past_step:
                    self._leave_mid_step()
                else:
                    self._take_requested()
                self._saver.finish()
        finally:
            self._release()
        if (error := self._saver.unreported) is not None:
            failures = len(self.metrics.failures)
            raise SnapshotError(
                f"{failures} snapshot(s) failed, the last because: {error}"
            ) from error

    def _leave_mid_step(self) -> None:
        """Abort everything that needs a next step(): there will be none."""
        step = self.step_count + 1
        reason = self._watch.problem or (
            f"close() in the middle of step {step}: step() was not called after the optimizer's"
        )
        if self._requested is not None:
            error = SnapshotError(f"the snapshot that was asked for was not taken: {reason}")
            self._requested.give_up(error)
            self._saver.unreported = error
        if self._needs_step:
            self._saver.give_up(reason)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self.close()
        elif not self._closed and self._creator.is_this_process:
            # The error may have left a step half done, so nothing more is captured.
            try:
                self._saver.quiesce()
            except Exception as error:  # also a warning made an error: the user's own comes first
                logger.error("while an exception ended training: %s", error)
            finally:
                self._release()

    def _capture_dense(self) -> DensePart:
        part = capture_dense(self.model, self.optimizers, self.tables, self._position())
        if self._refuses_nan:
            refuse_nan(part)
        return part

    @property
    def _is_past_step(self) -> bool:
        """Return whether the model may be past the known step."""
        return self._watch.has_stepped or self._watch.is_inside_step or self._recorder.is_mid_step

    @property
    def _is_mid_step(self) -> bool:
        return self._is_busy or self._is_past_step

    @property
    def _needs_step(self) -> bool:
        """Return whether the current snapshot waits for rows or the dense part as of a step."""
        snapshot = self._saver.in_flight
        return snapshot is not None and snapshot.state == "capturing" and not snapshot.is_held

    @contextmanager
    def _in_call(self, name: str) -> Iterator[None]:
        """Allow one call at a time: a signal handler may interrupt one."""
        if self._is_busy:
            raise UsageError(f"{name} from a signal's handler while another call is being made")
        self._is_busy = True
        try:
            use_training_streams(self._devices)
            yield
        finally:
            self._is_busy = False

    def _position(self) -> dict[str, Any]:
        return {
            "step": self._account.step,
            "num_samples": self._account.num_samples,
            "extra_state": self._extra_state() if self._extra_state else None,
            "rows_unsaved": self._count_unsaved_rows(),
            "samples_lost": self.metrics.samples_lost,
        }

    def _count_unsaved_rows(self) -> int | None:
        num_rows = sum(table.num_embeddings for table in self.tables)
        if num_rows > _MOST_COUNTED_ROWS or not all(
            table.untouched_rows_keep_still() and self._watch.is_proven(table)
            for table in self.tables
        ):
            return None
        return sum(int(tracker.num_dirty()) for tracker in self._trackers.values())

    def _recover_from(
        self,
        from_store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        mode: RecoveryMode,
        *,
        strict: bool,
        on_damage: OnDamage,
    ) -> RecoveryReport:
        recoverer = self._recoverer

        def read(readers: list[StoreReader]) -> RecoveryReport:
            if isinstance(from_store, str | os.PathLike):
                return recoverer.recover_from(readers[0], mode, strict=strict, on_damage=on_damage)
            return recoverer.recover_from_parts(readers, mode, strict=strict, on_damage=on_damage)

        stores = [from_store] if isinstance(from_store, str | os.PathLike) else from_store
        if not stores:
            raise UsageError("from_store is an empty list; needed: the stores of all processes")
        return read_committed_all(stores, read, lambda report: not report.damaged_segments)

    def _note_shards(self, report: RecoveryReport) -> None:
        """Record that some shards of the live model were restored."""
        report.samples_lost = self._account.note_shards_recovered(
            report.shards, report.row_updates_lost
        )
        if report.damaged_segments:
            # Rows that kept an older state count as saved; only a base snapshot saves them again.
            self._base_rule.forget_base()

    def _note_all(self, report: RecoveryReport, *, is_own_store: bool) -> None:
        """Record that everything was restored: training resumes from the position of the report."""
        self._account.note_all_recovered(
            report.step, report.num_samples, self._recoverer.position.samples_lost
        )
        self._watch.forget()
        self._saver.forget_saved_rows()
        self._saver.restart_interval()
        self._may_train = True
        # Of another store nothing is in this one yet: the next step() takes a base snapshot.
        if is_own_store and not self.store.is_empty:
            self._base_rule.note_recovered()
            if report.damaged_segments:
                self._base_rule.forget_base()

    def leave_to_parent(self) -> None:
        """Detach in a forked child: the model runs there as if this object did not exist."""
        self._recorder.detach()
        self._watch.detach()
        self._saver.leave_to_parent()

    def _require_open(self) -> None:
        self._creator.require("Checkpointer")
        if self._closed:
            raise UsageError("the Checkpointer is closed")

    def _require_recovered(self) -> None:
        self._require_open()
        if not self._may_train:
            last = self.store.dense.segments[-1]
            raise UsageError(
                f"'{self.store.directory}' holds a snapshot of step {last.last_step}; call "
                "recover() before the first step(), or choose an empty directory to start again"
            )

    def _require_true(self) -> None:
        if self._watch.problem is not None:
            raise UsageError(self._watch.problem)

    def _release(self) -> None:
        self._recorder.detach()
        self._watch.detach()
        try:
            self._saver.close()  # interrupted: threads may still write, so the locks are kept
        except Exception:
            self._closed = True
            self.store.close()
            raise
        self._closed = True
        self.store.close()
