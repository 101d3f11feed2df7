"""The snapshot in flight: when one begins, what each step does for it, how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from cpr_ext.errors import SnapshotError
from cpr_ext.metrics.run_state import RunState
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.saving.background_capture import BackgroundCapture
from cpr_ext.saving.capture_end import CaptureEnd
from cpr_ext.saving.capture_ways import (
    CaptureWay,
    ChooseFirst,
    CopyOnWrite,
    DeviceCopy,
    ShardByShard,
    Turn,
)
from cpr_ext.saving.claims import Claims
from cpr_ext.saving.due import DueSnapshots
from cpr_ext.saving.outcomes import Outcomes
from cpr_ext.saving.rebase_policy import ArrayNames, RebasePolicy
from cpr_ext.saving.segment_capture import WriteOptions
from cpr_ext.saving.selection import SnapshotKind
from cpr_ext.saving.snapshot import CaptureDense, DenseSource, Snapshot
from cpr_ext.saving.snapshot_rows import SnapshotContext
from cpr_ext.storage.commit_thread import CommitThread
from cpr_ext.tracking.inventory import Inventory
from cpr_ext.tracking.key_watch import KeyWatch
from cpr_ext.tracking.table_watch import TableWatch

logger = logger_of("saving")

Consistency = Literal["row", "step"]
WhenBusy = Literal["delay", "wait"]
# A capture that training waits for comes back after a chunk: in a fraction of a millisecond.
_CHUNK_BYTES = 512 << 10
_POLL_SECONDS = 0.0005


@dataclass(frozen=True)
class SavingOptions:
    """How snapshots are taken; see ``Checkpointer``.

    Attributes:
        chooses_all: every dirty row is saved, so that no selection is needed.
        devices: GPUs that have tables, and choose rows during training.
        gather_bytes: limit of the memory for rows that GPUs copy at one step; 0: they copy none.
        slots_per_step: staging slots that a step fills at most, unless training waits for all.
    """

    consistency: Consistency
    when_busy: WhenBusy
    write: WriteOptions
    chooses_all: bool
    devices: Sequence[int]
    gather_bytes: int = 0
    slots_per_step: int = 1

    @property
    def chooses_at_once(self) -> bool:
        """Whether a partial snapshot of one step is of the step that begins it.

        Choosing reads all counts: it is done while training runs, unless every dirty row is to be
        saved or the step is given.
        """
        is_given = self.chooses_all or self.when_busy == "wait"
        return self.consistency == "step" and is_given

    def way(
        self, kind: SnapshotKind, *, at_once: bool, is_overlapping: bool
    ) -> Callable[[Snapshot], CaptureWay]:
        """Return the class that captures a snapshot, or what makes one."""
        is_of_one_step = self.consistency == "step"
        if self.gather_bytes and kind == "partial" and not at_once:
            return partial(
                DeviceCopy,
                max_bytes=self.gather_bytes,
                is_of_one_step=is_of_one_step,
                chooses_at_once=self.chooses_at_once,
            )
        if not is_of_one_step:
            is_later = is_overlapping or (bool(self.devices) and not at_once)
            return ShardByShard if is_later else CaptureWay
        if not is_overlapping:
            return CaptureWay
        return ChooseFirst if kind == "partial" and not self.chooses_at_once else CopyOnWrite


@dataclass(frozen=True)
class SavingParts:
    """What a ``Saver`` works with.

    Attributes:
        watch: sees what changes the tables.
        inventory: knows what no snapshot holds.
        keys: knows which slots of keyed tables have another key than the newest snapshot.
        overlap: captures while training reads the tables; None: between steps only.
        capture_dense: copies everything that is not a row.
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
    overlap: BackgroundCapture | None
    capture_dense: CaptureDense


class Saver:
    """Takes one snapshot after the other; every call comes from the training thread.

    Attributes:
        in_flight: the snapshot in progress, if any.
        may_begin: asked before a snapshot begins; called with True, it returns when one may.
        due: when the next one is due.
        claims: what the snapshots claim.
        outcomes: what became of them.
    """

    def __init__(self, parts: SavingParts, options: SavingOptions) -> None:
        self.in_flight: Snapshot | None = None
        self.may_begin: Callable[[bool], bool] = lambda waits: True
        self.due = DueSnapshots(parts.account)
        self.claims = parts.claims
        self.outcomes = parts.outcomes
        self._parts = parts
        self._options = options
        self._account = parts.account
        self._overlap = parts.overlap
        self._way: CaptureWay | None = None  # of the snapshot in flight
        self._arrays: ArrayNames = {}
        self._is_overlapping = False
        self._end = CaptureEnd(parts.claims)  # of the snapshot in flight
        self._next_number = parts.context.store.last_snapshot + 1

    def begin_if_due(self) -> Snapshot | None:
        """Begin the snapshot that the schedule asks for, if it does and none is on its way."""
        if self.in_flight is not None:
            if self._options.when_busy == "delay":
                self.due.note_step(is_busy=True)
                return None
            if not self.due.is_due(self.outcomes.last_bytes):
                return None
            self.finish()
        is_due = self._parts.rebase.is_due_at_once or self.due.is_due(self.outcomes.last_bytes)
        if not is_due or not self.may_begin(False):
            self.due.note_step(is_busy=False)
            return None
        self.due.note_step(is_busy=False, begins=True)
        return self.begin(self._parts.rebase.next_kind())

    def take(self, kind: SnapshotKind) -> Snapshot:
        """Capture all of a snapshot now; partial ones only where there is a base to them."""
        self.finish()
        if not self.may_begin(True):
            raise SnapshotError("rows of this worker are being rebuilt, and a peer was lost")
        needed = self._parts.rebase.next_kind()
        snapshot = self.begin("base" if needed == "base" else kind, at_once=True)
        self.advance()
        return snapshot

    def begin(self, kind: SnapshotKind, *, at_once: bool = False) -> Snapshot:
        """Begin a snapshot; ``at_once``: all of it is captured by the caller's next call."""
        parts = self._parts
        self.due.restart_interval()
        parts.inventory.follow_structure(parts.watch)
        parts.watch.check(replaced=True)
        self.claims.check_some(self.in_flight)
        parts.watch.changes.settle()
        parts.keys.look()
        self.claims.begin_snapshot(kind)
        self._arrays = parts.rebase.array_names()
        self._is_overlapping = not at_once and self._may_overlap()
        write = self._options.write
        way = self._options.way(kind, at_once=at_once, is_overlapping=self._is_overlapping)
        if self._is_overlapping:
            is_copied = way in (ChooseFirst, CopyOnWrite)
            write = replace(write, max_chunk_bytes=_CHUNK_BYTES, copy_on_write=is_copied)
        self._end.restart()
        dense = DenseSource(
            parts.capture_dense,
            _looking(parts.inventory, parts.account),
            self.claims.round_trips.note_committed,
        )
        snapshot = Snapshot(self._next_number, kind, parts.context, dense, write)
        self._next_number += 1
        self._way = way(snapshot)
        self.in_flight = snapshot
        self._way.begin(Turn(self._account.step, self._account.num_samples))
        return snapshot

    def _may_overlap(self) -> bool:
        if self._overlap is None or self._overlap.was_broken:
            return False
        if self._options.consistency == "row":
            return True
        obstacle = self._overlap.one_step_obstacle()
        if obstacle is not None:
            logger.info("training waits while a snapshot of one step is captured: %s", obstacle)
        return obstacle is None

    def pause(self) -> None:
        """Wait until no other thread uses tables or trackers."""
        if self._overlap is not None and self.in_flight is not None:
            self._overlap.pause()

    def resume(self) -> None:
        """Do a step's work for the scrub and the snapshot in progress before training resumes."""
        self.claims.note_step(self.in_flight)
        if self.in_flight is None or self._way is None:
            return
        if not self._is_overlapping:
            wait = self._options.consistency == "step" and self._way.needs_training_to_wait
            most = self._options.slots_per_step * self._parts.context.pipeline.slot_bytes
            self.advance(max_bytes=0 if wait else most, wait_for_slot=wait)
            return
        if self._end.is_now(self.in_flight) and self._copies_dense_last:
            self._end.check(self.in_flight)  # this step has waited for rows
            return
        self.advance(rows=False)
        snapshot = self.in_flight
        if self._overlap is not None and snapshot is not None and snapshot.has_rows_left:
            self._overlap.resume(self._way, self._account.step)

    @property
    def _copies_dense_last(self) -> bool:
        """Whether the dense part is copied after all rows, at a step that waits for none."""
        return self._is_overlapping and self._options.consistency == "row"

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
            self.in_flight.give_up("the optimizer has made new per-row state")
            self.in_flight.rows.put_back()
            self.begin("base")
        snapshot, way = self.in_flight, self._way
        assert way is not None
        self._parts.watch.check(replaced=True)
        if not snapshot.has_rows_left:
            self._end.check(snapshot)
        step, num_samples = self._account.step, self._account.num_samples
        turn = Turn(step, num_samples, max_bytes, wait_for_slot, rows)
        if snapshot.state == "capturing":
            self._way = way.advance(turn)
        snapshot.finish_if_captured(step, num_samples)

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
        if self.in_flight is not None:
            self.advance()
            self.in_flight.wait_until_done()
        self.settle()

    def settle(self, warn: bool = True) -> None:
        """Take note of a snapshot that was committed or failed, and of compaction."""
        self.outcomes.settle_compaction()
        self.claims.settle()
        snapshot = self.in_flight
        if snapshot is None or not snapshot.is_done:
            return
        self.in_flight = self._way = None
        if snapshot.error is not None:
            self.outcomes.note_failed(snapshot, snapshot.error, warn=warn)
            return
        self._parts.keys.note_committed()
        self.claims.note_committed(snapshot)
        if snapshot.kind == "base" or snapshot.is_complete:
            self._parts.watch.changes.note_all_saved()
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
        self.outcomes.stop_compaction()
        self._parts.committer.call(lambda: None).result()  # no manifest changes any more

    def _end_snapshot(self) -> None:
        if self._overlap is not None:
            self._overlap.forget()
        if self.in_flight is None:
            return
        if self.in_flight.state == "capturing":
            self.in_flight.give_up("recovery or an error came first")
            self.in_flight.rows.put_back()
            self.in_flight = self._way = None
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
        self.claims.scrub.restart()  # nothing is to be freed later, when a graph may be captured
        self.outcomes.close()


def _looking(inventory: Inventory, account: RunState) -> Callable[[], bool]:
    """Look up what no snapshot holds, for the caller to hear of; return what does so later.

    A gradient may wait, or an attribute change, in the steps until the dense part is copied.
    """
    inventory.look()
    step = account.step

    def is_accounted() -> bool:
        return inventory.look() if account.step != step else not inventory.unaccounted

    return is_accounted
