"""What a training loop holds: counts lookups, takes snapshots, recovers."""

from __future__ import annotations

import errno
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from cpr_ext._native import native
from cpr_ext.committer import Committer
from cpr_ext.compactor import Compactor
from cpr_ext.dense import (
    DensePart,
    capture_dense,
    refuse_nan,
    restore_dense,
    shared_optimizers,
)
from cpr_ext.dense_tree import read_position
from cpr_ext.devices import devices_of, make_stagers, use_training_streams
from cpr_ext.errors import SnapshotError, SnapshotFailedWarning, UsageError
from cpr_ext.merging import MergeLimits
from cpr_ext.metrics import Metrics, ScalarWriter
from cpr_ext.overlap import Overlap
from cpr_ext.priorities import LargestChange, MostFrequentlyUsed, Priority, make_tracker
from cpr_ext.recovering import OnDamage, Recoverer, RecoveryMode
from cpr_ext.recovery_report import RecoveryReport
from cpr_ext.retention import Retention, keep_needed
from cpr_ext.run_costs import CostMeter
from cpr_ext.schedules import EverySeconds, Progress, Schedule
from cpr_ext.segment_capture import WriteOptions
from cpr_ext.selection import Selector
from cpr_ext.snapshot import Snapshot, SnapshotKind
from cpr_ext.store import Store
from cpr_ext.store_reader import StoreReader
from cpr_ext.tables import Table, find_tables, prioritized_tables, register_tables, shard_row_range
from cpr_ext.tracking import LookupRecorder

logger = logging.getLogger("cpr_ext")

Consistency = Literal["row", "step"]
DEFAULT_SLOT_BYTES = 8 << 20
DEFAULT_KEEP_BYTES = 32 << 20
# Smaller tables are captured faster than a thread is woken for them.
_OVERLAP_BYTES = 16 << 20
# A capture that training waits for comes back after a chunk: well below a millisecond.
_CHUNK_BYTES = 1 << 20
_NO_LOOKUPS = (
    "no lookup was seen in the first step, so no row counts as changed. A model that was compiled "
    "and called before the Checkpointer was made has no hooks in its graphs: make the Checkpointer "
    "first, or call torch.compiler.reset(); for lookups outside modules call record_lookups()"
)


class Checkpointer:
    """Prioritized snapshots of a model's embedding tables, and recovery from them.

    Args:
        model: any module with ``nn.Embedding`` or ``nn.EmbeddingBag`` tables.
        optimizers: the optimizer or optimizers of its parameters.
        directory: the store; made if it does not exist.
        priority: which rows a partial snapshot saves first.
        schedule: when to take one.
        consistency: ``"row"`` captures a snapshot over several steps, so that the pause at any one
            step is bounded; ``"step"`` captures all of it as it is at one step: that at which it is
            due or, while capture overlaps training, the one after its rows were chosen.
        overlap: ``"auto"`` captures on a thread of its own while forward and backward run, which
            only read the tables; with ``consistency="step"``, rows about to change are copied aside
            first. For tables that nothing but their optimizer changes: another change is noticed
            (unless it is hidden from PyTorch by ``.data``) and costs the snapshot. Tables of less
            than 16 MB, on a GPU, or without a torch optimizer, are captured inside ``step()``, as
            are all with ``"never"``; so are snapshots of one step if an optimizer changes rows that
            were not looked up. ``"always"`` overlaps small tables too, and raises where it cannot.
        num_shards: into how many row ranges to cut every table, each recovered on its own.
        tables: parameters or modules by name, instead of those found in ``model``; or a list of
            ready-made ``cpr_ext.tables.Table``, which may be empty: then only the dense part is
            saved.
        extra_state: called for each snapshot; what it returns (plain values and tensors) is saved
            with it and given back as ``RecoveryReport.extra_state``.
        rebase_after: take a base snapshot instead of a partial one once partial snapshots have
            written this many times the bytes of the last base, so that disk use and recovery time
            stay bounded; None: never.
        compact_after: merge a shard's partial segments, in the background, once they hold this many
            times the bytes of its base; partial snapshots then need no new base. None: never.
        compact_bytes_per_second: the most that compaction reads and writes; None: no limit.
        retention: how many full-recovery points to keep, and how many bytes in all: a
            ``cpr_ext.retention.Retention``.
        when_busy: what to do when a snapshot is due while the last is still on its way:
            ``"delay"`` starts it once that one is committed, ``"wait"`` holds training until then,
            so that snapshots are taken at the same steps whatever the disk's speed.
        on_nan: ``"raise"`` gives a snapshot up rather than save NaN; ``"save"`` saves it.
        slot_bytes, num_slots: size and number of the staging slots, the memory of a snapshot; so
            much is also taken on every GPU that has tables.
        keep_bytes: most memory for rows copied aside; when it is full, training waits for the disk.
        num_threads: threads for counting, selecting and copying, the caller's included.
        direct_io: write past the page cache where the file system allows it.
        count_row_updates: with priorities other than ``MostFrequentlyUsed``, which does so anyway,
            count updates row by row (4 bytes each), so that metrics tell how many were lost.
        scalar_writer: the metrics are written to it after each snapshot and recovery; anything
            with ``add_scalar(tag, value, step)``, such as TensorBoard's ``SummaryWriter``.

    Raises:
        UsageError: the model has no tables, or an option is out of range.
        StoreError: the directory is no store, holds another model, or is in use.
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
        when_busy: Literal["delay", "wait"] = "delay",
        on_nan: Literal["raise", "save"] = "raise",
        overlap: Literal["auto", "always", "never"] = "auto",
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        keep_bytes: int = DEFAULT_KEEP_BYTES,
        num_slots: int = 3,
        num_threads: int | None = None,
        direct_io: bool = True,
        count_row_updates: bool = False,
        scalar_writer: ScalarWriter | None = None,
    ) -> None:
        _require("consistency", consistency, ("row", "step"))
        _require("when_busy", when_busy, ("delay", "wait"))
        _require("on_nan", on_nan, ("raise", "save"))
        _require("overlap", overlap, ("auto", "always", "never"))
        if num_shards < 1:
            raise UsageError(f"num_shards is {num_shards}; it must be at least 1")
        for option, value in (
            ("rebase_after", rebase_after),
            ("compact_after", compact_after),
            ("compact_bytes_per_second", compact_bytes_per_second),
        ):
            if value is not None and not value > 0:
                raise UsageError(f"{option} is {value}; it must be positive, or None")
        if num_threads is not None and num_threads < 1:
            raise UsageError(f"num_threads is {num_threads}; it must be at least 1, or None")
        if priority is not None and not isinstance(priority, Priority):
            raise UsageError(f"priority is {priority!r}; needed: such as MostFrequentlyUsed(0.125)")
        if schedule is not None and not isinstance(schedule, Schedule):
            raise UsageError(f"schedule is {schedule!r}; needed: such as EverySteps(500)")
        if isinstance(priority, LargestChange) and on_nan == "save":
            raise UsageError('LargestChange cannot rank NaN rows; use on_nan="raise" with it')
        self.model = model
        self.optimizers = (
            [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        )
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
        overlaps = self._decide_overlap(overlap)
        self.priority = MostFrequentlyUsed() if priority is None else priority
        self.schedule = EverySeconds(60) if schedule is None else schedule
        self.consistency: Consistency = consistency
        self.num_shards = num_shards
        self.metrics = Metrics()
        self._extra_state = extra_state
        self._rebase_after = rebase_after
        self._when_busy = when_busy
        self._write_options = WriteOptions(direct_io, refuse_nan=on_nan == "raise")
        self._devices = devices_of(table.weight for table in self.tables)
        use_training_streams(self._devices)
        self._stagers = make_stagers(self._devices, slot_bytes=slot_bytes, num_slots=num_slots)
        self._threads = native.ThreadPool(num_threads=num_threads or min(4, os.cpu_count() or 1))
        prioritized = {table.name for table in prioritized_tables(self.tables)}
        self._trackers = {
            table.name: make_tracker(
                self.priority, table, table.name in prioritized, count_updates=count_row_updates
            )
            for table in self.tables
        }
        self._scalar_writer = scalar_writer
        self._meter = CostMeter(self.tables, prioritized, self.priority.fraction, num_shards)
        self.schedule.observe(self._meter.costs())
        self._selector = Selector(
            self.tables, self._trackers, self.priority, prioritized, num_shards, self._threads
        )
        self._pipeline = native.SnapshotPipeline(
            num_slots=num_slots,
            slot_bytes=slot_bytes,
            keep_bytes=keep_bytes,
            pool=self._threads,
            stagers=self._stagers,
        )
        self.store = Store(
            directory, tables=self.tables, num_shards=num_shards, retention=retention
        )
        self._recorder = LookupRecorder(self.tables, list(self._trackers.values()), self._threads)
        self._recorder.attach()
        self._overlap = Overlap(self.tables, self._recorder) if overlaps else None
        self._recoverer = Recoverer(
            model,
            self.optimizers,
            self.tables,
            self.store,
            self._trackers,
            self._recorder,
            self._threads,
            direct_io=direct_io,
        )
        self._committer = Committer()
        self._compactor: Compactor | None = None
        if compact_after is not None:
            ranges = [
                {table.name: self._range(table, shard) for table in self.tables}
                for shard in range(num_shards)
            ]
            limits = MergeLimits(bytes_per_second=compact_bytes_per_second)
            self._compactor = Compactor(
                self.store, self._committer, ranges, after=compact_after, limits=limits
            )
        self._step = 0
        self._num_samples = 0
        self._next_snapshot = self.store.last_snapshot + 1
        self._in_flight: Snapshot | None = None
        self._last_start = (0, time.monotonic())
        self._snapshot_bytes = 0
        self._shard_saved_samples = [0] * num_shards
        self._base_bytes = 0
        self._partial_bytes = 0
        # Per-row arrays by table: of the base in the store, and of the snapshot in flight.
        self._base_arrays: dict[str, list[str]] | None = None
        self._in_flight_arrays: dict[str, list[str]] = {}
        self._is_overlapping = False
        self._may_train = self.store.is_empty
        self._base_failed = False
        self._is_first_step = True
        self._closed = False

    @property
    def step_count(self) -> int:
        """Training steps done, those before a restart counted in."""
        return self._step

    @property
    def num_samples(self) -> int:
        """Samples trained, those before a restart counted in."""
        return self._num_samples

    def step(self, num_samples: int = 1) -> Snapshot | None:
        """Call after each optimizer step: counts the batch's lookups, may start or go on saving.

        Args:
            num_samples: samples in the batch; losses are then told in samples, not in steps.

        Returns:
            The snapshot that began at this step, if one did.

        Raises:
            UsageError: the store holds snapshots that were not recovered, or this object is closed.
            RowIndexError: the batch looked up a row that its table does not have.
        """
        started = time.perf_counter()
        self._require_recovered()
        if num_samples < 0:
            raise UsageError(f"num_samples is {num_samples}; it must not be negative")
        use_training_streams(self._devices)
        if self._is_first_step and self._recorder.misses_lookups:
            warnings.warn(_NO_LOOKUPS, stacklevel=2)
        self._is_first_step = False
        self._pause_capture()
        self._recorder.flush()
        self._step += 1
        self._num_samples += num_samples
        self._settle()
        begun = self._begin_if_due()
        if self._is_overlapping:
            self._advance(rows=False)
            self._resume_capture()
        else:
            wait = self.consistency == "step"
            self._advance(max_bytes=0 if wait else self._pipeline.slot_bytes, wait_for_slot=wait)
        stall_seconds = time.perf_counter() - started
        if self._overlap is not None:
            stall_seconds += self._overlap.take_held_seconds()
        self.metrics.stall_seconds += stall_seconds
        self.metrics.max_stall_seconds = max(self.metrics.max_stall_seconds, stall_seconds)
        self._note_step(num_samples, stall_seconds)
        return begun

    def save(self, kind: SnapshotKind = "partial") -> Snapshot:
        """Take a snapshot now, captured as a whole at this step; it is committed behind training.

        Args:
            kind: ``"partial"`` (selected rows) or ``"base"`` (all rows).

        Returns:
            The snapshot; :meth:`wait` returns once it is durable.
        """
        _require("kind", kind, ("partial", "base"))
        self._require_recovered()
        use_training_streams(self._devices)
        self._pause_capture()
        self._recorder.flush()
        self._finish_in_flight()
        snapshot = self._begin("base" if self._next_kind() == "base" else kind, at_once=True)
        self._advance()
        return snapshot

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the snapshot in flight is durable; False if the time ran out first.

        Raises:
            SnapshotError: it failed; its cause is ``__cause__``.
        """
        self._require_open()
        use_training_streams(self._devices)
        self._advance()
        snapshot = self._in_flight
        if snapshot is None:
            return True
        if not snapshot.wait_until_done(timeout_seconds):
            return False
        self._settle(warn=False)
        if snapshot.error is not None:
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
        up_to_step: int | None = None,
    ) -> RecoveryReport:
        """Bring back what was lost.

        Without ``shards``, after the process died: every shard, the dense part, random number
        generators and the position. With ``shards``, in a live model: only the rows of these.

        Args:
            shards: the lost shards; every other row, and the position, stay as they are.
            mode: ``"partial"`` goes on from the newest state of every row; ``"full"`` goes back to
                the last full-recovery point, a single step at which all rows were saved.
            from_store: where to begin if this store is still empty: another store, of any number
                of shards, which is only read. A list: the stores of all processes of a job, each
                with its parts of the tables; they are cut anew as this model's tables are, and the
                dense part is the newest. Once this store holds a snapshot it is not looked at.
            strict: False takes from ``from_store`` what matches: a table that has grown keeps its
                old rows; other tables and parameters that differ stay as they are.
                ``RecoveryReport.differences`` lists them.
            on_damage: ``"fall_back"`` restores the newest undamaged state of each row, and the
                report tells what was damaged and which rows are older, by how much, or missing.
                ``"raise"`` reads and checks all files first (of ``shards``, or of the whole store),
                and if any is damaged raises before anything is changed.
            up_to_step: take no snapshot of a later step, and forget those that there are. 0, for a
                model that begins anew: forget all.

        Returns:
            What was restored; ``step`` is where training goes on, 0 if the store is empty.

        Raises:
            UsageError: no such shard, ``shards`` together with ``mode="full"`` or ``from_store``,
                or ``strict=False`` without ``from_store``.
            StoreError: the store does not fit the model (all differences are listed, nothing was
                changed), or holds no full-recovery point.
            DamageError: no undamaged snapshot of the dense part is left; or anything is damaged,
                with ``on_damage="raise"``: names every damaged file, nothing was changed.
        """
        _require("mode", mode, ("partial", "full"))
        _require("on_damage", on_damage, ("raise", "fall_back"))
        self._require_open()
        use_training_streams(self._devices)
        started = time.perf_counter()
        if shards is not None and mode == "full":
            raise UsageError('full recovery goes back with all shards; leave out "shards"')
        for shard in shards or ():
            if not 0 <= shard < self.num_shards:
                raise UsageError(
                    f"shard {shard} does not exist; there are 0 to {self.num_shards - 1}"
                )
        if shards is not None and from_store is not None:
            raise UsageError('from_store is for all shards; leave out "shards"')
        if up_to_step is not None and (shards is not None or from_store is not None):
            raise UsageError("up_to_step goes with neither shards nor from_store")
        if not strict and from_store is None:
            raise UsageError("strict=False needs from_store; a store is written by one model only")
        self._quiesce()
        if shards is not None:
            self._recorder.flush()
            report = RecoveryReport(self._step, self._num_samples, tuple(sorted(set(shards))))
            self._recoverer.recover_shards(report, on_damage=on_damage)
            self._note_shards(report)
        elif from_store is not None and self.store.is_empty:
            report = self._recover_from(from_store, mode, strict=strict, on_damage=on_damage)
            self._note_all(report, is_own_store=False)
        else:
            report = self._recoverer.recover_all(
                mode, steps_done=self._step, on_damage=on_damage, up_to_step=up_to_step
            )
            self._note_all(report, is_own_store=True)
        report.seconds = time.perf_counter() - started
        self._meter.note_recovery(report.seconds, report.bytes_read, of_shards=shards is not None)
        self._tell()
        for damaged in report.damaged_segments:
            logger.warning("damaged segment %s: %s", damaged.path, damaged.reason)
        return report

    def shared_part(self) -> DensePart:
        """What data-parallel workers have in common, as it is now, to hand to :meth:`take_over`.

        Parameters, optimizers (but those of tables alone), generators, position, extra state.
        """
        self._require_open()
        optimizers = shared_optimizers(self.optimizers, self.tables)
        return capture_dense(self.model, optimizers, self.tables, self._position())

    def take_over(self, part: DensePart, *, generators: bool, samples_lost: int = 0) -> Any:
        """Go on from where another worker of the same job is; table rows stay as they are.

        A step in flight is given up; a snapshot in flight goes on.

        Args:
            part: that worker's :meth:`shared_part`.
            generators: take its random number generators, too.
            samples_lost: samples of which these rows lost the effect; noted in the metrics.

        Returns:
            That worker's extra state.

        Raises:
            StoreError: it trains another model; nothing was changed.
        """
        self._require_recovered()
        self._pause_capture()
        position = read_position(part.tree())
        optimizers = shared_optimizers(self.optimizers, self.tables)
        restore_dense(part, self.model, optimizers, self.tables, generators=generators)
        self._step, self._num_samples = position.step, position.num_samples
        self.metrics.samples_lost += samples_lost
        self._note_lost_samples()
        return position.extra_state

    def record_lookups(self, table: str, indices: torch.Tensor) -> None:
        """Count lookups that no hook sees (``F.embedding`` or ``weight[indices]``)."""
        self._recorder.record(table, indices)

    @contextmanager
    def tracking_paused(self) -> Iterator[None]:
        """Count no lookups inside the block."""
        with self._recorder.paused():
            yield

    def close(self) -> None:
        """Finish the snapshot in flight and give everything back. Closing twice is fine.

        Raises:
            SnapshotError: snapshots failed that no one was told of by an exception.
        """
        if self._closed:
            return
        use_training_streams(self._devices)
        try:
            self._finish_in_flight()
        finally:
            self._release()
        if failures := self.metrics.failures:
            raise SnapshotError(
                f"{len(failures)} snapshot(s) failed, the last because: {failures[-1]}"
            )

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
        elif not self._closed:
            # The error may have left a step half done, so nothing more is captured.
            self._quiesce()
            self._release()

    # --- snapshots ---

    def _begin_if_due(self) -> Snapshot | None:
        if self._in_flight is not None:
            if self._when_busy == "delay" or not self._is_due():
                return None
            self._finish_in_flight()
        # A base comes at once, so that there is something to recover; if it failed, by schedule.
        at_once = self.store.is_empty and not self._base_failed
        return self._begin(self._next_kind()) if at_once or self._is_due() else None

    def _is_due(self) -> bool:
        step, moment = self._last_start
        seconds = time.monotonic() - moment
        return self.schedule.is_due(Progress(self._step - step, seconds, self._snapshot_bytes))

    def _next_kind(self) -> SnapshotKind:
        if self.store.is_empty or self._base_arrays != self._array_names():
            return "base"
        if self._rebase_after is not None and self._base_bytes:
            return (
                "base" if self._partial_bytes > self._rebase_after * self._base_bytes else "partial"
            )
        return "partial"

    def _array_names(self) -> dict[str, list[str]]:
        return {table.name: table.array_names() for table in self.tables}

    def _decide_overlap(self, overlap: str) -> bool:
        obstacle = Overlap.obstacle(self.tables)
        if overlap == "always" and obstacle is not None:
            raise UsageError(f'overlap="always" cannot be: {obstacle}')
        size_bytes = sum(table.weight.nbytes for table in self.tables)
        is_worth_it = overlap == "always" or size_bytes >= _OVERLAP_BYTES
        return overlap != "never" and is_worth_it and obstacle is None

    def _may_overlap(self) -> bool:
        if self._overlap is None or self._overlap.was_broken:
            return False
        if self.consistency == "row":
            return True
        obstacle = Overlap.one_step_obstacle(self.tables)
        if obstacle is not None:
            logger.info("training waits while a snapshot of one step is captured: %s", obstacle)
        return obstacle is None

    def _begin(self, kind: SnapshotKind, *, at_once: bool = False) -> Snapshot:
        self._last_start = (self._step, time.monotonic())
        self._in_flight_arrays = self._array_names()
        self._is_overlapping = not at_once and self._may_overlap()
        is_held = self._is_overlapping and self.consistency == "step"
        # Choosing reads all counts: it is done while training runs, unless every dirty row is to be
        # saved or the step is given.
        may_choose_ahead = self.priority.fraction < 1 and self._when_busy == "delay"
        hold_later = is_held and kind == "partial" and may_choose_ahead
        chooses_on_gpu = bool(self._devices) and not at_once and self.consistency == "row"
        options = self._write_options
        if self._is_overlapping:
            options = replace(options, max_chunk_bytes=_CHUNK_BYTES, copy_on_write=is_held)
        self._in_flight = Snapshot(
            number=self._next_snapshot,
            kind=kind,
            store=self.store,
            selector=self._selector,
            pipeline=self._pipeline,
            options=options,
            capture_dense=self._capture_dense,
            choose_later=(self._is_overlapping and not is_held) or chooses_on_gpu,
            hold_later=hold_later,
        )
        self._next_snapshot += 1
        if is_held and not hold_later:
            self._in_flight.hold(self._step, self._num_samples)
        return self._in_flight

    def _capture_dense(self) -> DensePart:
        part = capture_dense(self.model, self.optimizers, self.tables, self._position())
        if self._write_options.refuse_nan:
            refuse_nan(part)
        return part

    def _position(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "num_samples": self._num_samples,
            "extra_state": self._extra_state() if self._extra_state else None,
        }

    def _pause_capture(self) -> None:
        if self._overlap is not None:
            self._overlap.pause()

    def _resume_capture(self) -> None:
        snapshot = self._in_flight
        if self._overlap is not None and snapshot is not None and snapshot.has_rows_left:
            self._overlap.resume(snapshot, self._step)

    def _advance(
        self, *, max_bytes: int = 0, wait_for_slot: bool = True, rows: bool = True
    ) -> None:
        """Capture about ``max_bytes`` of rows (0: all) unless the capture thread does; commit."""
        self._pause_capture()
        snapshot = self._in_flight
        if snapshot is None or snapshot.state != "capturing":
            return
        if self._array_names() != self._in_flight_arrays:
            # The optimizer has made per-row state since: rows without it and a dense part that
            # tells of it would not fit together.
            snapshot.cancel("the optimizer has made new per-row state")
            snapshot.put_back()
            snapshot = self._begin("base")
        if snapshot.is_to_be_held and snapshot.is_chosen and not rows:
            snapshot.hold(self._step, self._num_samples)
        if rows:
            snapshot.capture_rows(self._step, max_bytes=max_bytes, wait_for_slot=wait_for_slot)
        snapshot.finish_if_captured(self._step, self._num_samples)
        if snapshot.is_captured:
            self._committer.submit(snapshot)

    def _settle(self, warn: bool = True) -> None:
        """Take note of a snapshot that was committed or failed, and of compaction."""
        self._settle_compaction()
        snapshot = self._in_flight
        if snapshot is None or not snapshot.is_done:
            return
        self._in_flight = None
        if snapshot.error is None:
            self._note_committed(snapshot)
            return
        snapshot.put_back()
        if self.store.retention.release_when_full and _is_disk_full(snapshot.error):
            # Waited for: the next snapshot reserves its space as soon as it begins.
            history = Retention(full_recovery_points=0)
            self._committer.call(lambda: self.store.retain(history)).result()
        self._base_failed = self._base_failed or snapshot.kind == "base"
        self.metrics.failed_snapshots += 1
        self._meter.note_failed_snapshot()
        self.metrics.failures.append(str(snapshot.error))
        logger.error("snapshot %d failed: %s", snapshot.number, snapshot.error)
        if warn:
            text = f"snapshot {snapshot.number} failed; training goes on: {snapshot.error}"
            warnings.warn(text, SnapshotFailedWarning, stacklevel=3)

    def _settle_compaction(self) -> None:
        if (compactor := self._compactor) is None:
            return
        if compactor.merges_done != self.metrics.compactions:
            self.metrics.compactions = compactor.merges_done
            self._note_bytes_in_store()
        while compactor.errors:
            error = compactor.errors.pop(0)
            self.metrics.failed_compactions += 1
            text = f"compaction failed; training goes on and no snapshot is affected: {error}"
            warnings.warn(text, SnapshotFailedWarning, stacklevel=4)

    def _note_committed(self, snapshot: Snapshot) -> None:
        self.metrics.bytes_written += snapshot.file_bytes
        self._snapshot_bytes = snapshot.file_bytes
        self._shard_saved_samples = [snapshot.num_samples] * self.num_shards
        self._meter.note_snapshot(snapshot.file_bytes, is_base=snapshot.kind == "base")
        if snapshot.kind == "base":
            self.metrics.base_snapshots += 1
            self._base_arrays = self._in_flight_arrays
            self._base_bytes, self._partial_bytes = snapshot.file_bytes, 0
        else:
            self.metrics.partial_snapshots += 1
            self._partial_bytes += snapshot.file_bytes
        if self._compactor is not None:
            self._compactor.consider()
        self._tell()

    def _note_step(self, num_samples: int, stall_seconds: float) -> None:
        is_saving = self._in_flight is not None
        self._meter.note_step(num_samples, stall_seconds, is_saving=is_saving)
        self.metrics.row_updates = self._recorder.num_lookups
        self._note_lost_samples()
        if self._meter.has_news:
            self._tell()

    def _note_lost_samples(self) -> None:
        total_samples = max(self.schedule.job_samples() or 0, self._num_samples, 1)
        self.metrics.portion_of_lost_samples = self.metrics.samples_lost / (
            total_samples * self.num_shards
        )

    def _tell(self) -> None:
        """Let the schedule and the writer know what changed."""
        self.schedule.observe(self._meter.costs())
        if self._scalar_writer is not None:
            self.metrics.write_scalars(self._scalar_writer, self._step)

    def _finish_in_flight(self) -> None:
        """Capture what is left of the snapshot in flight, now, and wait for its commit."""
        if self._in_flight is not None:
            self._advance()
            self._in_flight.wait_until_done()
            self._settle()

    # --- recovery ---

    def _quiesce(self) -> None:
        """End the snapshot in flight: give it up if it is still capturing, else let it commit."""
        self._end_snapshot()
        if self._compactor is not None:
            self._compactor.stop()
            self._settle_compaction()
        self._committer.call(lambda: None).result()  # no manifest changes any more

    def _end_snapshot(self) -> None:
        if self._overlap is not None:
            self._overlap.forget()
        if self._in_flight is not None:
            if self._in_flight.state == "capturing":
                self._in_flight.cancel("recovery or an error came first")
                self._in_flight.put_back()
                self._in_flight = None
                return
            self._in_flight.wait_until_done()
            self._settle()

    def _recover_from(
        self,
        from_store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        mode: RecoveryMode,
        *,
        strict: bool,
        on_damage: OnDamage,
    ) -> RecoveryReport:
        if isinstance(from_store, str | os.PathLike):
            return self._recoverer.recover_from(
                StoreReader(from_store), mode, strict=strict, on_damage=on_damage
            )
        if not from_store:
            raise UsageError("from_store is an empty list; needed: the stores of all processes")
        return self._recoverer.recover_from_parts(
            [StoreReader(path) for path in from_store], mode, strict=strict, on_damage=on_damage
        )

    def _note_shards(self, report: RecoveryReport) -> None:
        """Some shards of the live model were restored."""
        for shard in report.shards:
            report.samples_lost += self._num_samples - self._shard_saved_samples[shard]
            # What was trained until now is lost once; a later failure must not count it again.
            self._shard_saved_samples[shard] = self._num_samples
        self.metrics.samples_lost += report.samples_lost
        self._note_lost_samples()
        if report.row_updates_lost is None or self.metrics.row_updates_lost is None:
            self.metrics.row_updates_lost = None
        else:
            self.metrics.row_updates_lost += report.row_updates_lost
        if report.damaged_segments:
            # Rows that kept an older state count as saved; only a base snapshot saves them again.
            self._base_arrays = None

    def _note_all(self, report: RecoveryReport, *, is_own_store: bool) -> None:
        """Everything was restored: training goes on from the position of the report."""
        self._step, self._num_samples = report.step, report.num_samples
        self._shard_saved_samples = [self._num_samples] * self.num_shards
        self._last_start = (self._step, time.monotonic())
        self._may_train = True
        # Of another store nothing is in this one yet: the next step() takes a base snapshot.
        if is_own_store and not self.store.is_empty:
            self._base_arrays = None if report.damaged_segments else self._array_names()
            self._note_bytes_in_store()

    def _note_bytes_in_store(self) -> None:
        newest = self.store.last_snapshot
        records = [r for shard in self.store.shards for r in keep_needed(shard.segments, newest)]
        self._base_bytes = sum(r.file_bytes for r in records if r.kind == "base")
        self._partial_bytes = sum(r.file_bytes for r in records if r.kind != "base")

    def _range(self, table: Table, shard: int) -> tuple[int, int]:
        return shard_row_range(table.num_embeddings, shard, self.num_shards)

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("the Checkpointer is closed")

    def _require_recovered(self) -> None:
        self._require_open()
        if not self._may_train:
            last = self.store.dense.segments[-1]
            raise UsageError(
                f"'{self.store.directory}' holds a snapshot of step {last.last_step}; call "
                "recover() before the first step(), or choose an empty directory to start anew"
            )

    def _release(self) -> None:
        self._closed = True
        if self._overlap is not None:
            self._overlap.close()
        self._recorder.detach()
        if self._compactor is not None:
            self._compactor.close()
        self._committer.close()
        self.store.close()


def _is_disk_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _require(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{option} is {value!r}; allowed: {', '.join(allowed)}")
