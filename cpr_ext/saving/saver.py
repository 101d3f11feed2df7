"""The snapshot in flight: when one begins, what each step does for it, how it ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal

from cpr_ext.errors import SnapshotError
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.saving.amount import CaptureAmount
from cpr_ext.saving.background_capture import BackgroundCapture
from cpr_ext.saving.claims import Claims
from cpr_ext.saving.outcomes import Outcomes
from cpr_ext.saving.rebase_policy import ArrayNames, RebasePolicy
from cpr_ext.saving.run_state import RunState
from cpr_ext.saving.schedules import Progress
from cpr_ext.saving.segment_capture import WriteOptions
from cpr_ext.saving.selection import SnapshotKind
from cpr_ext.saving.snapshot import CaptureDense, Snapshot
from cpr_ext.saving.snapshot_rows import SnapshotContext
from cpr_ext.storage.commit_thread import CommitThread
from cpr_ext.tracking.inventory import Inventory
from cpr_ext.tracking.key_watch import KeyWatch
from cpr_ext.tracking.table_events import TableEvents
from cpr_ext.tracking.table_watch import TableWatch

logger = logger_of("saving")

#: How rows are captured. A sweep: each with its value when its turn comes, over any number of
#: steps. One step: as they are at the step that begins the snapshot, before training changes them.
#: Device copy: GPUs choose them while training runs, and copy them at one step in their own memory.
Way = Literal["sweep", "one step", "device copy"]

# A capture that training waits for comes back after a chunk: in a fraction of a millisecond.
_CHUNK_BYTES = 512 << 10
_POLL_SECONDS = 0.0005
# So many snapshots follow one that was captured over several steps, until one is of one step.
_MOST_ROUNDS = 4
#: So many snapshots in a row begin late before it is said: one base takes longer than others.
LATE_IN_A_ROW = 3


class DueSnapshots:
    """Asks the schedule, and logs one warning if snapshots begin late, one after another.

    A snapshot is late if it begins at the first step at which the one before it is committed.
    """

    def __init__(self, account: RunState) -> None:
        self._account = account
        self._was_busy = False
        self._in_a_row = 0
        self.restart_interval()

    def restart_interval(self) -> None:
        """Have the schedule count from here to the next snapshot."""
        self._last_start = (self._account.step, time.monotonic())

    def is_due(self, last_bytes: int, ahead: int = 0) -> bool:
        """Return whether the schedule asks for a snapshot.

        Args:
            last_bytes: of the files of the newest snapshot.
            ahead: whether it will in so many steps.
        """
        step, moment = self._last_start
        steps, seconds = self._account.step - step, time.monotonic() - moment
        if ahead:
            seconds *= 1 + ahead / max(1, steps)
        progress = Progress(steps + ahead, seconds, last_bytes)
        return self._account.schedule.is_due(progress)

    def note_step(self, *, is_busy: bool, begins: bool = False) -> None:
        """Record a step.

        Args:
            is_busy: a snapshot is in progress.
            begins: one begins.
        """
        if begins:
            is_late = self._was_busy and not self._account.schedule.follows_disk
            self._in_a_row = self._in_a_row + 1 if is_late else 0
            if self._in_a_row == LATE_IN_A_ROW:
                logger.warning(
                    "snapshots are due faster than they are written: the last %d began late, as "
                    "soon as the one before was committed. Rows are saved less often than the "
                    "schedule asks for, and a lost shard loses more: use a longer interval, a "
                    "smaller fraction, rounded rows (precision=) or a faster disk",
                    LATE_IN_A_ROW,
                )
        self._was_busy = is_busy


@dataclass(frozen=True)
class SavingOptions:
    """How snapshots are taken; see ``Checkpointer``.

    Attributes:
        at_once: training waits for each snapshot, all of which is captured between two steps.
        gather_bytes: limit of the memory for rows that GPUs copy at one step; 0: they copy none.
        slots_per_step: staging slots that a step fills at most, unless training waits for all.
    """

    at_once: bool
    write: WriteOptions
    gather_bytes: int = 0
    slots_per_step: int = 1


@dataclass(frozen=True)
class SavingParts:
    """What a ``Saver`` works with.

    Attributes:
        watch: sees what changes the tables.
        inventory: knows what no snapshot holds.
        amount: bounds how much is dirty.
        keys: knows which slots of keyed tables have another key than the newest snapshot.
        overlap: captures while training reads the tables; None: between steps only.
        capture_dense: copies everything that is not a row.
        events: say whether a snapshot may begin.
    """

    context: SnapshotContext
    account: RunState
    rebase: RebasePolicy
    committer: CommitThread
    watch: TableWatch
    inventory: Inventory
    keys: KeyWatch
    claims: Claims
    outcomes: Outcomes
    amount: CaptureAmount
    overlap: BackgroundCapture | None
    capture_dense: CaptureDense
    events: TableEvents


class Saver:
    """Takes one snapshot after the other; every call comes from the training thread.

    Attributes:
        in_flight: the snapshot in progress, if any.
        due: when the next one is due.
        claims: what the snapshots claim.
        outcomes: what became of them.
    """

    def __init__(self, parts: SavingParts, options: SavingOptions) -> None:
        self.in_flight: Snapshot | None = None
        self.due = DueSnapshots(parts.account)
        self.claims = parts.claims
        self.outcomes = parts.outcomes
        self._parts = parts
        self._options = options
        self._account = parts.account
        self._overlap = parts.overlap
        self._way: Way = "sweep"  # of the snapshot in flight
        self._is_given = False  # device copies are to be of the step that begins it
        self._begun_at = 0  # its step
        self._rounds_left = 0  # snapshots that may follow, until one is a full-recovery point
        self._arrays: ArrayNames = {}
        self._is_overlapping = False
        self._had_rows = False  # at the step before
        self._next_number = parts.context.store.last_snapshot + 1

    @property
    def _waits(self) -> bool:
        return self._account.schedule.when_busy == "wait"

    def begin_if_due(self) -> Snapshot | None:
        """Begin the snapshot that the schedule asks for, or one that makes its rows complete."""
        waits = self._waits
        if self.in_flight is not None:
            if not waits:
                self.due.note_step(is_busy=True)
                return None
            if not self.due.is_due(self.outcomes.last_bytes):
                return None
            self.finish()
            is_due = True
        else:
            is_due = self._parts.rebase.is_due_at_once or self.due.is_due(self.outcomes.last_bytes)
        is_round = not is_due and self._rounds_left > 0 and self._is_round_wanted(waits)
        if not (is_due or is_round) or not self.may_begin(False):
            self.due.note_step(is_busy=False)
            return None
        self.due.note_step(is_busy=False, begins=is_due)
        if is_due:
            self._rounds_left = _MOST_ROUNDS
        if waits and is_due:
            self.claims.finish()  # in a job, all workers are to have the same points
        kind = self._parts.rebase.next_kind()
        is_point = waits and is_due and not self._parts.rebase.is_due_at_once
        is_large = kind == "base" and not self._parts.amount.fits(kind)
        if is_point and is_large and self._parts.rebase.has_base:
            kind = "partial"  # of this step; the base comes next
        return self.begin(kind, is_point=is_point, is_round=is_round)

    def may_begin(self, waits: bool) -> bool:
        """Return whether a snapshot may begin now; ``waits``: once one may."""
        return all(ask(waits) for ask in self._parts.events.may_begin)

    def _is_round_wanted(self, waits: bool) -> bool:
        """Return whether to capture what is dirty; if points are given, to leave a small rest."""
        amount, kind = self._parts.amount, self._parts.rebase.next_kind()
        if not waits:
            return amount.can_fit()
        if self._options.at_once or amount.fits(kind):
            return False
        ahead = amount.steps(kind) + 1
        return kind == "base" or self.due.is_due(self.outcomes.last_bytes, ahead=ahead)

    def take(self, kind: SnapshotKind) -> Snapshot:
        """Capture all of a snapshot now; partial ones only where there is a base to them."""
        self.finish()
        if not self.may_begin(True):
            raise SnapshotError("rows of this worker are being rebuilt, and a peer was lost")
        needed = self._parts.rebase.next_kind()
        snapshot = self.begin("base" if needed == "base" else kind, at_once=True)
        self.advance()
        return snapshot

    def begin(
        self,
        kind: SnapshotKind,
        *,
        at_once: bool = False,
        is_point: bool = False,
        is_round: bool = False,
    ) -> Snapshot:
        """Begin a snapshot.

        Args:
            at_once: all of it is captured by the caller's next call.
            is_point: it must be of this step.
            is_round: it is none that the schedule asks for.
        """
        parts = self._parts
        if not is_round:
            self.due.restart_interval()
        parts.inventory.follow_structure(parts.watch)
        parts.watch.check(replaced=True)
        self.claims.begin_snapshot()
        if parts.watch.changes.settle():
            parts.amount.forget()
        parts.keys.look()
        self._arrays = parts.rebase.array_names()
        overlap = self._overlap
        self._is_overlapping = not (at_once or overlap is None or overlap.was_broken)
        write = self._options.write
        if self._is_overlapping:
            write = replace(write, max_chunk_bytes=_CHUNK_BYTES)
        all_dirty = is_round and kind == "partial"
        fits = parts.amount.fits(kind, all_dirty=all_dirty)
        of_one_step = at_once or is_point or self._options.at_once or fits
        parts.amount.begin()
        self._begun_at = self._account.step
        self._had_rows = False
        snapshot = Snapshot(self._next_number, kind, parts.context, parts.capture_dense, write)
        snapshot.rows.are_all_dirty = all_dirty
        self._next_number += 1
        self.in_flight = snapshot
        self._way = "one step" if of_one_step else "sweep"
        if self._options.gather_bytes and kind == "partial" and not at_once:
            self._way = "device copy"
            snapshot.begin_choosing()
            self._is_given = self._waits
            if self._is_given:
                snapshot.choose_rows()
        elif of_one_step:
            if not all_dirty:  # else which rows are dirty stays the same until all are captured
                snapshot.choose_rows()
            snapshot.fix_step(self._account.step, self._account.num_samples)
        else:
            snapshot.begin_choosing()
        self.claims.note_captured(snapshot)
        return snapshot

    def pause(self) -> None:
        """Wait until no other thread uses tables or trackers."""
        if self._overlap is not None:
            self._overlap.pause()

    def resume(self) -> None:
        """Do a step's work for a check and the snapshot in progress before training resumes."""
        self.claims.note_step()
        self._advance_in_step()
        overlap, snapshot = self._overlap, self.in_flight
        if overlap is None:
            return
        if self._is_overlapping and snapshot is not None and snapshot.has_rows_left:
            overlap.resume(snapshot, self._account.step)
        elif self.claims.has_rows_left:
            overlap.compare(self.claims.run)

    def _advance_in_step(self) -> None:
        if self.in_flight is None:
            return
        if not self._is_overlapping:
            wait = self._way == "one step"
            most = self._options.slots_per_step * self._parts.context.pipeline.slot_bytes
            self.advance(max_bytes=0 if wait else most, wait_for_slot=wait)
            return
        had_rows, self._had_rows = self._had_rows, self.in_flight.has_rows_left
        if had_rows and not self._had_rows and self._way != "one step":
            return  # this step has waited for rows: the dense part is copied at the next
        self.advance(rows=False)

    def advance(self, *, max_bytes: int = 0, wait_for_slot: bool = True, rows: bool = True) -> None:
        """Capture about ``max_bytes`` of rows (0: all) unless the capture thread does; commit."""
        self.pause()
        if self.in_flight is None:
            return
        if self.in_flight.state == "capturing":
            self._capture(max_bytes, wait_for_slot=wait_for_slot, rows=rows)
        self._submit()

    def _capture(self, max_bytes: int, *, wait_for_slot: bool, rows: bool) -> None:
        """Capture more of the snapshot in flight, which may become another."""
        assert self.in_flight is not None
        if self._parts.rebase.array_names() != self._arrays:
            # The optimizer has made per-row state since: rows without it and a dense part that
            # tells of it would not fit together.
            self._drop(self.in_flight, "the optimizer has made new per-row state")
            self.begin("base")
        snapshot = self.in_flight
        self._parts.watch.check(replaced=True)
        step, num_samples = self._account.step, self._account.num_samples
        if self._way == "device copy" and snapshot.state == "capturing":
            rows = self._copy_on_devices(snapshot, wait=wait_for_slot)
            if rows and self._is_given:  # all of it at this step
                max_bytes, wait_for_slot = 0, True
        if rows and snapshot.state == "capturing":
            snapshot.capture_rows(step, max_bytes=max_bytes, wait_for_slot=wait_for_slot)
        snapshot.finish_if_captured(step, num_samples)
        self.claims.note_captured(snapshot)

    def _copy_on_devices(self, snapshot: Snapshot, *, wait: bool) -> bool:
        """Have GPUs copy the rows that they have chosen; True: they cannot.

        Without the memory for it the snapshot becomes one of another way.
        """
        step, num_samples = self._account.step, self._account.num_samples
        snapshot.choose_rows(wait=wait)
        if not snapshot.rows.are_chosen:
            return False
        if snapshot.gather(step, num_samples, self._options.gather_bytes):
            return False
        self._way = "one step" if self._is_given else "sweep"
        if self._is_given:
            snapshot.fix_step(step, num_samples)
        return True

    def _drop(self, snapshot: Snapshot, reason: str) -> None:
        """Drop a snapshot that is capturing, without a report: another comes in its place."""
        snapshot.give_up(reason)
        snapshot.rows.put_back()
        self.claims.note_done(snapshot)

    def _submit(self) -> None:
        """Have the snapshot in flight committed if it is captured, unless it was handed over."""
        snapshot = self.in_flight
        if snapshot is not None and snapshot.state == "captured" and not snapshot.is_submitted:
            # In this order: Ctrl-C in between submits it again, which does nothing.
            self._parts.committer.submit(snapshot.commit)
            snapshot.is_submitted = True

    def advance_for(self, seconds: float) -> None:
        """Call :meth:`advance` in pieces, until all is captured or the time is over."""
        deadline = time.monotonic() + seconds
        self.pause()
        while (snapshot := self.in_flight) is not None and snapshot.state == "capturing":
            if time.monotonic() >= deadline:
                return
            before = snapshot.rows.bytes_captured
            self.advance(max_bytes=_CHUNK_BYTES, wait_for_slot=False)
            if snapshot.rows.bytes_captured == before:
                time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))

    def abort(self, reason: str) -> None:
        """Give the snapshot in flight up if it is still capturing."""
        self.pause()
        if self.in_flight is not None:
            self.in_flight.give_up(reason)
            self.settle()

    def finish(self) -> None:
        """Capture what is left of the snapshot in flight, now, and wait for its commit."""
        self.pause()
        if self.in_flight is not None:
            self.advance()
            self.in_flight.wait_until_done()
        self.settle()

    def settle(self, warn: bool = True) -> None:
        """Take note of a snapshot that was committed or failed."""
        self.outcomes.note_read_back()
        snapshot = self.in_flight
        if snapshot is None or not snapshot.is_done:
            return
        self.in_flight = None
        self.claims.note_done(snapshot)
        if snapshot.error is not None:
            self._rounds_left = 0
            self.outcomes.note_failed(snapshot, snapshot.error, warn=warn)
            return
        self._parts.keys.note_committed()
        if snapshot.kind == "base" or snapshot.is_candidate:
            self._parts.watch.changes.note_all_saved()
        has_all = snapshot.rows.have_all_dirty
        num_steps = snapshot.last_step - self._begun_at
        self._parts.amount.note_committed(
            snapshot.kind, snapshot.rows.bytes_captured, num_steps, has_all=has_all
        )
        waits = self._waits
        if snapshot.rows.are_of_fixed_step or not (has_all or waits):
            self._rounds_left = _MOST_ROUNDS if waits else 0
        else:
            self._rounds_left -= 1
            if self._rounds_left == 0 and not waits:
                logger.info(
                    "snapshots %d to %d reached no full-recovery point: rows change faster than "
                    "they are captured and written",
                    *(snapshot.number - _MOST_ROUNDS + 1, snapshot.number),
                )
        self.outcomes.note_committed(snapshot, self._arrays)

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
        self._parts.committer.call(lambda: None).result()  # no manifest changes any more

    def _end_snapshot(self) -> None:
        if self._overlap is not None:
            self._overlap.forget()
        if self.in_flight is None:
            return
        if self.in_flight.state == "capturing":
            self._drop(self.in_flight, "recovery or an error came first")
            self.in_flight = None
            return
        self._submit()
        self.in_flight.wait_until_done()
        self.settle()

    def detach(self) -> None:
        """In a forked child, which has no threads: training there does nothing for a snapshot."""
        if self._overlap is not None:
            self._overlap.detach()

    def close(self) -> None:
        """End the threads; may be called again, also after an interrupt."""
        if self._overlap is not None:
            self._overlap.close()
        self._parts.context.sources.close()
        self.claims.end()
        self.outcomes.close()
