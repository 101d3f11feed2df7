"""The snapshot in flight: when one begins, what each step does for it, how it ends."""

from __future__ import annotations

import errno
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from cpr_ext.cuda import trim_memory
from cpr_ext.errors import SnapshotError, SnapshotFailedWarning, StorageError, StoreError
from cpr_ext.metrics.run_state import RunState
from cpr_ext.runtime.log_text import encodable, logger_of
from cpr_ext.saving.background_capture import Overlap
from cpr_ext.saving.capture_mode import CaptureMode
from cpr_ext.saving.lateness import Lateness
from cpr_ext.saving.proofs import Proofs
from cpr_ext.saving.rebase_policy import ArrayNames, BaseRule
from cpr_ext.saving.round_trip import DifferenceError, RoundTrips, bytes_of
from cpr_ext.saving.scrub import ChangedRow, Scrub
from cpr_ext.saving.segment_capture import WriteOptions
from cpr_ext.saving.selection import Selector, SnapshotKind
from cpr_ext.saving.snapshot import CaptureDense, Snapshot
from cpr_ext.schedules.intervals import Progress
from cpr_ext.state.table import Table
from cpr_ext.storage.commit_thread import Committer
from cpr_ext.storage.compactor import Compactor
from cpr_ext.storage.retention import Retention
from cpr_ext.storage.store import Store
from cpr_ext.tracking.inventory import Inventory
from cpr_ext.tracking.row_ranges import RowSpans
from cpr_ext.tracking.table_watch import TableWatch

logger = logger_of("saving")

Consistency = Literal["row", "step"]
WhenBusy = Literal["delay", "wait"]
# A capture that training waits for comes back after a chunk: in a fraction of a millisecond.
_CHUNK_BYTES = 512 << 10
_POLL_SECONDS = 0.0005
# The step that ends a snapshot copies the dense part, too.
_TABLES_CHECKED_AT_END = 4
_MOST_UNPROVEN = 1000  # older ones are superseded by then


@dataclass(frozen=True)
class SavingOptions:
    """How snapshots are taken; see ``Checkpointer``.

    Attributes:
        chooses_all: every dirty row is saved, so that no selection is needed.
        devices: GPUs that have tables, and choose rows during training.
        gather_bytes: limit of the memory for rows that GPUs copy at one step; 0: they copy none.
    """

    consistency: Consistency
    when_busy: WhenBusy
    write: WriteOptions
    chooses_all: bool
    devices: Sequence[int]
    gather_bytes: int = 0


class Saver:
    """Takes one snapshot after the other; every call comes from the training thread.

    Args:
        watch: sees what changes the tables.
        scrub: finds rows that changed although nothing saw it.
        inventory: knows what no snapshot holds.
        overlap: captures while training reads the tables; None: between steps only.
        compactor: merges segments after commits; None: nobody does.
        capture_dense: copies everything that is not a row.

    Attributes:
        in_flight: the snapshot in progress, if any.
        may_begin: asked before a snapshot begins; called with True, it returns when one may.
        unreported: the error of a failed snapshot that no exception reported, none being committed
            since.
    """

    def __init__(
        self,
        store: Store,
        tables: Sequence[Table],
        trackers: dict[str, Any],
        selector: Selector,
        pipeline: Any,
        account: RunState,
        base_rule: BaseRule,
        committer: Committer,
        watch: TableWatch,
        scrub: Scrub,
        inventory: Inventory,
        *,
        overlap: Overlap | None,
        compactor: Compactor | None,
        capture_dense: CaptureDense,
        options: SavingOptions,
    ) -> None:
        self._scrub = scrub
        self._inventory = inventory
        self._proofs = Proofs()
        self._unproven: list[Snapshot] = []  # complete, and not recorded as proven
        self._round_trips = RoundTrips(
            store.directory,
            scrub,
            committer,
            direct_io=options.write.direct_io,
            precision=options.write.precision,
        )
        self.in_flight: Snapshot | None = None
        self.may_begin: Callable[[bool], bool] = lambda waits: True
        self.unreported: Exception | None = None
        self._watch = watch
        self._tables = {table.name: table for table in tables}
        self._trackers = trackers
        self._store = store
        self._selector = selector
        self._pipeline = pipeline
        self._account = account
        self._base_rule = base_rule
        self._committer = committer
        self._overlap = overlap
        self._compactor = compactor
        self._capture_dense = capture_dense
        self._options = options
        self._next_number = store.last_snapshot + 1
        self._arrays: ArrayNames = {}  # of the snapshot in flight
        self._is_overlapping = False
        self._lateness = Lateness()
        self._last_bytes = 0
        self.restart_interval()

    @property
    def chooses_all(self) -> bool:
        """Whether a partial snapshot saves every dirty row."""
        return self._options.chooses_all

    def restart_interval(self) -> None:
        """Have the schedule count from here to the next snapshot."""
        self._last_start = (self._account.step, time.monotonic())

    def begin_if_due(self) -> Snapshot | None:
        """Begin the snapshot that the schedule asks for, if it does and none is on its way."""
        if self.in_flight is not None:
            if self._options.when_busy == "delay":
                self._note_lateness(is_busy=True)
                return None
            if not self._is_due():
                return None
            self.finish()
        if not (self._base_rule.is_due_at_once or self._is_due()) or not self.may_begin(False):
            self._note_lateness(is_busy=False)
            return None
        self._note_lateness(is_busy=False, begins=True)
        return self.begin(self._base_rule.next_kind())

    def _note_lateness(self, *, is_busy: bool, begins: bool = False) -> None:
        follows_disk = self._account.schedule.follows_disk
        self._lateness.note_step(is_busy=is_busy, begins=begins, follows_disk=follows_disk)

    def take(self, kind: SnapshotKind) -> Snapshot:
        """Capture all of a snapshot now; partial ones only where there is a base to them."""
        self.finish()
        if not self.may_begin(True):
            raise SnapshotError("rows of this worker are being rebuilt, and a peer was lost")
        needed = self._base_rule.next_kind()
        snapshot = self.begin("base" if needed == "base" else kind, at_once=True)
        self.advance()
        return snapshot

    def _is_due(self) -> bool:
        step, moment = self._last_start
        seconds = time.monotonic() - moment
        return self._account.schedule.is_due(
            Progress(self._account.step - step, seconds, self._last_bytes)
        )

    def _may_overlap(self) -> bool:
        if self._overlap is None or self._overlap.was_broken:
            return False
        if self._options.consistency == "row":
            return True
        obstacle = self._overlap.one_step_obstacle()
        if obstacle is not None:
            logger.info("training waits while a snapshot of one step is captured: %s", obstacle)
        return obstacle is None

    def begin(self, kind: SnapshotKind, *, at_once: bool = False) -> Snapshot:
        """Begin a snapshot; ``at_once``: all of it is captured by the caller's next call."""
        self.restart_interval()
        self._inventory.refuse_replaced_modules()
        for table in self._inventory.moved_tables():
            self._watch.note_moved(table)
        self._watch.check_all()
        self._check_clean_rows()
        self._watch.settle()
        self._scrub.begin_snapshot()
        self._arrays = self._base_rule.array_names()
        self._is_overlapping = not at_once and self._may_overlap()
        mode, write = self._mode(kind, at_once=at_once), self._options.write
        if self._is_overlapping:
            write = replace(write, max_chunk_bytes=_CHUNK_BYTES, copy_on_write=mode.is_of_one_step)
        self._inventory.look()
        snapshot = self.in_flight = Snapshot(
            number=self._next_number,
            kind=kind,
            store=self._store,
            selector=self._selector,
            pipeline=self._pipeline,
            options=write,
            capture_dense=self._capture_dense,
            scrub=self._scrub,
            is_accounted=lambda: not self._inventory.unaccounted,
            on_committed=self._round_trips.note_committed,
            mode=mode,
        )
        self._next_number += 1
        if mode is CaptureMode.GATHER and self._chooses_at_once:
            snapshot.choose_rows()
        if mode is CaptureMode.COPY_ON_WRITE:
            snapshot.fix_step(self._account.step, self._account.num_samples)
        return snapshot

    def _mode(self, kind: SnapshotKind, *, at_once: bool) -> CaptureMode:
        options = self._options
        if options.gather_bytes and kind == "partial" and not at_once:
            return CaptureMode.GATHER
        if options.consistency == "row":
            is_later = self._is_overlapping or (bool(options.devices) and not at_once)
            return CaptureMode.SHARD_BY_SHARD if is_later else CaptureMode.AT_ONCE
        if not self._is_overlapping:
            return CaptureMode.AT_ONCE
        is_ahead = kind == "partial" and not self._chooses_at_once
        return CaptureMode.CHOOSE_FIRST if is_ahead else CaptureMode.COPY_ON_WRITE

    @property
    def _chooses_at_once(self) -> bool:
        """Whether a partial snapshot of one step is of the step that begins it.

        Choosing reads all counts: it is done while training runs, unless every dirty row is to be
        saved or the step is given.
        """
        options = self._options
        is_given = options.chooses_all or options.when_busy == "wait"
        return options.consistency == "step" and is_given

    def pause(self) -> None:
        """Wait until no other thread uses tables or trackers."""
        if self._overlap is not None and self.in_flight is not None:
            self._overlap.pause()

    def go_on(self) -> None:
        """Do a step's work for the scrub and the snapshot in progress before training resumes."""
        self._scrub.note_step()
        self._scrub_some()
        if self.in_flight is None:
            return
        if self._is_overlapping:
            self.advance(rows=False)
            self._resume()
        else:
            gathers = self.in_flight.mode in (CaptureMode.GATHER, CaptureMode.GATHERED)
            wait = self._options.consistency == "step" and not gathers
            self.advance(max_bytes=0 if wait else self._pipeline.slot_bytes, wait_for_slot=wait)

    def take_held_seconds(self) -> float:
        """Return and reset the seconds that counting and capture blocked outside of ``step()``."""
        return self._watch.take_held_seconds()

    def _resume(self) -> None:
        snapshot = self.in_flight
        if self._overlap is not None and snapshot is not None and snapshot.has_rows_left:
            self._overlap.resume(snapshot, self._account.step)

    def advance(self, *, max_bytes: int = 0, wait_for_slot: bool = True, rows: bool = True) -> None:
        """Capture about ``max_bytes`` of rows (0: all) unless the capture thread does; commit."""
        self.pause()
        snapshot = self.in_flight
        if snapshot is None:
            return
        if snapshot.state == "capturing":
            snapshot = self._capture(snapshot, max_bytes, wait_for_slot=wait_for_slot, rows=rows)
        self._submit(snapshot)

    def _submit(self, snapshot: Snapshot) -> None:
        """Have a captured snapshot committed, unless it was handed over before."""
        if snapshot.is_captured and not snapshot.is_submitted:
            # In this order: Ctrl-C in between submits it again, which does nothing.
            self._committer.submit(snapshot.commit)
            snapshot.is_submitted = True

    def _capture(
        self, snapshot: Snapshot, max_bytes: int, *, wait_for_slot: bool, rows: bool
    ) -> Snapshot:
        """Capture more of the snapshot in flight; return the one that is in flight then."""
        if self._base_rule.array_names() != self._arrays:
            # The optimizer has made per-row state since: rows without it and a dense part that
            # tells of it would not fit together.
            snapshot.cancel("the optimizer has made new per-row state")
            snapshot.put_back()
            snapshot = self.begin("base")
        step, num_samples = self._account.step, self._account.num_samples
        self._watch.check_all()
        if not snapshot.has_rows_left and self._check_clean_rows(_TABLES_CHECKED_AT_END):
            snapshot.give_up(SnapshotError("rows of it changed unseen; see the warning"))
        if snapshot.mode is CaptureMode.CHOOSE_FIRST:
            if rows:  # captured rows and those still to be captured must be of this step
                snapshot.choose_rows(one_table=max_bytes > 0)
            if snapshot.is_chosen:
                snapshot.fix_step(step, num_samples)
        if snapshot.mode is CaptureMode.GATHER:
            snapshot.choose_rows(wait=wait_for_slot)
            if snapshot.is_chosen and not self._gather(snapshot):
                max_bytes, wait_for_slot = 0, True
        if rows and snapshot.mode not in (CaptureMode.CHOOSE_FIRST, CaptureMode.GATHER):
            snapshot.capture_rows(step, max_bytes=max_bytes, wait_for_slot=wait_for_slot)
        snapshot.finish_if_captured(step, num_samples)
        return snapshot

    def _gather(self, snapshot: Snapshot) -> bool:
        """Copy chosen rows on their GPUs; return False if training must wait for the host's."""
        is_one = self._options.consistency == "step"
        otherwise = CaptureMode.AT_ONCE if is_one else CaptureMode.SHARD_BY_SHARD
        step, num_samples = self._account.step, self._account.num_samples
        return (
            snapshot.gather(step, num_samples, self._options.gather_bytes, otherwise) or not is_one
        )

    def note_restored_rows(self) -> None:
        """Note that rows were restored: those that count as clean are as a store has them."""
        self._scrub.record_all()
        self._begin_proofs()

    def forget_saved_rows(self) -> None:
        """Forget saved rows: restored rows may differ from them."""
        self._scrub.forget()
        self._begin_proofs()

    def _begin_proofs(self) -> None:
        self._proofs.begin_pass()
        self._unproven = []
        self._committer.call(self._round_trips.drop).result()

    def scrub(self) -> list[ChangedRow]:
        """Compare all rows that count as clean now; return one of each table that differs.

        A snapshot that is being read back is read to its end first. What is proven then is
        recorded when this returns.
        """
        self.finish()
        self._committer.call(self._round_trips.finish).result()
        self._settle_round_trips()
        self._watch.check_all()
        self._scrub.restart()
        self._proofs.begin_pass()
        found = self._note_changed(self._scrub.run_pass())
        if not found:
            self._note_pass()
        self._record_proofs()
        self._committer.call(lambda: None).result()
        return found

    def are_unchanged(self, table: Table, ranges: RowSpans) -> bool:
        """Return whether rows that count as clean were all compared and have not changed."""
        return self._scrub.are_unchanged(table, ranges)

    def _note_pass(self) -> None:
        self._account.metrics.scrub_passes += 1
        if not self._scrub.is_known:
            self._proofs.forget()
        elif self._scrub.was_whole:
            self._proofs.finish_pass()
        else:  # a table that is not compared proves nothing
            self._proofs.begin_pass()

    def _scrub_some(self) -> None:
        """Compare the next rows of a pass, unless a snapshot is being captured."""
        is_capturing = self.in_flight is not None and self.in_flight.state == "capturing"
        if not is_capturing and self._scrub.is_due() and self._watch.looks_unchanged():
            passes = self._scrub.num_passes
            if not self._note_changed(self._scrub.advance()) and self._scrub.num_passes != passes:
                self._note_pass()
                for table in self._scrub.take_trusted():
                    kind = type(table.optimizer).__name__
                    text = "table '%s': a %s leaves rows without a gradient alone; rows count now"
                    logger.info(text, table.name, kind)

    def _check_clean_rows(self, most_tables: int | None = None) -> bool:
        """Return whether a row that counts as clean was found to be changed."""
        return bool(self._note_changed(self._scrub.check_some(most_tables=most_tables)))

    def _note_changed(self, found: list[ChangedRow]) -> list[ChangedRow]:
        if found:  # what PyTorch has counted is reported as such
            self._watch.check_all()
            found = [changed for changed in found if self._watch.is_proven(changed.table)]
        for changed in found:
            self._watch.note_hidden_change(
                changed.table,
                f"row {changed.row_id} counts as unchanged since it was saved, but differs: "
                "something writes past PyTorch, such as weight.data or another library",
            )
        if found:
            self._account.metrics.rows_changed_unseen += len(found)
            self._revoke(self._proofs.revoke(self.in_flight))
            self._scrub.restart()
        return found

    def _settle_round_trips(self) -> None:
        """Take back the claim of points whose files are not what was captured."""
        metrics = self._account.metrics
        metrics.round_trips = self._round_trips.num_done
        for difference, points in self._round_trips.take_found():
            metrics.round_trips_failed += 1
            self._base_rule.forget_base()
            for snapshot in points:
                snapshot.is_complete = False
            numbers = [snapshot.number for snapshot in points]
            self._revoke(numbers)
            text = encodable(
                f"snapshots {numbers} in '{self._store.directory}' are not what was captured: "
                f"{difference}{self._arrays_of(difference)}. The next snapshot is of all rows"
            )
            logger.error(text)
            warnings.warn(text, SnapshotFailedWarning, stacklevel=4)

    def _record_proofs(self) -> None:
        """Have the store record which snapshots are proven by now; waits for nothing."""
        proven = [snapshot for snapshot in self._unproven if snapshot.is_proven]
        if not proven:
            return
        self._unproven = [
            each for each in self._unproven if each.is_complete and each not in proven
        ]
        metrics = self._account.metrics
        metrics.proven_step = max(metrics.proven_step, *(each.last_step for each in proven))
        numbers = [snapshot.number for snapshot in proven]

        def record() -> None:
            try:
                self._store.note_proven(numbers)
            except (StorageError, StoreError) as error:
                logger.warning("that snapshots %s are proven is not recorded: %s", numbers, error)

        self._committer.submit(record)

    def _arrays_of(self, difference: DifferenceError) -> str:
        """Name the arrays of a row that differ, if it has not changed since its capture."""
        name, row_id = difference.table, difference.row_id
        if name is None or row_id < 0 or not self._trackers[name].is_clean(row_id, row_id + 1):
            return ""
        live = self._tables[name].arrays()
        names = [
            array
            for array, read in difference.arrays.items()
            if not torch.equal(bytes_of(live[array][row_id]), bytes_of(read))
        ]
        return f" (arrays: {', '.join(names) or 'none, its hash alone'})"

    def _revoke(self, numbers: list[int]) -> None:
        """Take the claim of full-recovery points back; it is durable when this returns."""
        if not numbers:
            return
        try:
            self._committer.call(lambda: self._store.revoke(numbers)).result()
        except StorageError as error:
            text = (
                f"snapshots {numbers} claim in '{self._store.directory}' to be complete, which is "
                f"not true, and this could not be recorded: {error}"
            )
            logger.error(text)
            warnings.warn(encodable(text), SnapshotFailedWarning, stacklevel=3)
        else:
            logger.warning("snapshots %s are no full-recovery points: rows had changed", numbers)

    def advance_for(self, seconds: float) -> None:
        """Call :meth:`advance` in pieces, until all is captured or the time is over."""
        deadline = time.monotonic() + seconds
        while (snapshot := self.in_flight) is not None and snapshot.state == "capturing":
            if time.monotonic() >= deadline:
                return
            before = snapshot.bytes_captured
            self.advance(max_bytes=_CHUNK_BYTES, wait_for_slot=False)
            if snapshot.bytes_captured == before:
                time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))

    def give_up(self, reason: str) -> None:
        """Give the snapshot in flight up, which is still capturing."""
        self.pause()
        if self.in_flight is not None:
            self.in_flight.cancel(reason)
            self.settle()

    def finish(self) -> None:
        """Capture what is left of the snapshot in flight, now, and wait for its commit."""
        if self.in_flight is not None:
            self.advance()
            self.in_flight.wait_until_done()
        self.settle()

    def settle(self, warn: bool = True) -> None:
        """Take note of a snapshot that was committed or failed, and of compaction."""
        self._settle_compaction()
        self._settle_round_trips()
        self._record_proofs()
        snapshot = self.in_flight
        if snapshot is None or not snapshot.is_done:
            return
        self.in_flight = None
        if snapshot.error is None:
            self._note_committed(snapshot)
            trim_memory(self._options.devices)  # what trackers gave is free now
            return
        snapshot.put_back()
        trim_memory(self._options.devices)
        if self._store.retention.release_when_full and _is_disk_full(snapshot.error):
            # Waited for: the next snapshot reserves its space as soon as it begins.
            history = Retention(full_recovery_points=0)
            self._committer.call(lambda: self._store.retain(history)).result()
        self._base_rule.note_failed(snapshot.kind, snapshot.error)
        self.unreported = snapshot.error
        self._account.note_failed(snapshot.error)
        logger.error("snapshot %d failed: %s", snapshot.number, snapshot.error)
        if warn:
            error = encodable(snapshot.error)
            text = f"snapshot {snapshot.number} failed; training continues: {error}"
            warnings.warn(text, SnapshotFailedWarning, stacklevel=3)

    def _note_committed(self, snapshot: Snapshot) -> None:
        snapshot.forget_taken()  # users may keep the snapshot
        self.unreported = None
        self._last_bytes = snapshot.file_bytes
        if snapshot.kind == "base" and not self._scrub.is_known:
            self._scrub.is_known = True  # all rows were recorded
            self._proofs.forget()
        self._proofs.add(snapshot)
        if snapshot.is_complete:
            self._unproven = [*self._unproven[1 - _MOST_UNPROVEN :], snapshot]
        if snapshot.kind == "base" or snapshot.is_complete:
            self._watch.note_all_saved()
        logger.info(
            "snapshot %d is durable: %s, of step %d, %.1f MB%s",
            snapshot.number,
            snapshot.kind,
            snapshot.last_step,
            snapshot.file_bytes / 1e6,
            ", a full-recovery point" if snapshot.is_complete else "",
        )
        self._base_rule.note_committed(snapshot.kind, snapshot.file_bytes, self._arrays)
        self._account.note_committed(
            snapshot.num_samples, snapshot.file_bytes, is_base=snapshot.kind == "base"
        )
        if self._compactor is not None:
            self._compactor.consider()
        self._account.publish()

    def _settle_compaction(self) -> None:
        if (compactor := self._compactor) is None:
            return
        metrics = self._account.metrics
        if compactor.merges_done != metrics.compactions:
            metrics.compactions = compactor.merges_done
            self._base_rule.measure_store()
        while compactor.errors:
            error = compactor.errors.pop(0)
            metrics.failed_compactions += 1
            text = f"compaction failed; training continues and no snapshot is affected: {error}"
            warnings.warn(text, SnapshotFailedWarning, stacklevel=4)

    def keep_up_to(self, step: int) -> bool:
        """Abort the snapshot in flight if it still captures; no other thread uses tables then.

        Returns:
            Whether no snapshot of later than ``step`` is in flight. One of then or before may be
            committed in the background.
        """
        if self._overlap is not None:
            self._overlap.forget()
        if self.in_flight is not None and self.in_flight.state == "capturing":
            self._end_snapshot()
        return self.in_flight is None or self.in_flight.last_step <= step

    def quiesce(self) -> None:
        """End the snapshot in flight: give it up if it is still capturing, else let it commit.

        No other thread uses tables, trackers or manifests when this returns.
        """
        self._end_snapshot()
        if self._compactor is not None:
            self._compactor.stop()
            self._settle_compaction()
        self._committer.call(lambda: None).result()  # no manifest changes any more

    def _end_snapshot(self) -> None:
        if self._overlap is not None:
            self._overlap.forget()
        if self.in_flight is not None:
            if self.in_flight.state == "capturing":
                self.in_flight.cancel("recovery or an error came first")
                self.in_flight.put_back()
                self.in_flight = None
                return
            self._submit(self.in_flight)
            self.in_flight.wait_until_done()
            self.settle()

    def leave_to_parent(self) -> None:
        """In a forked child, which has no threads: training there does nothing for a snapshot."""
        if self._overlap is not None:
            self._overlap.detach()

    def close(self) -> None:
        """End the threads; may be called again, also after an interrupt."""
        if self._overlap is not None:
            self._overlap.close()
        if self._compactor is not None:
            self._compactor.close()
        self._committer.close()
        trim_memory(self._options.devices)


def _is_disk_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
