"""How the rows of a snapshot are chosen and captured: one class for each way.

A way drives one snapshot. The training thread calls :meth:`CaptureWay.begin`, and
:meth:`CaptureWay.advance` between two steps. A capture thread calls :meth:`CaptureWay.run` while
training only reads the tables.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from cpr_ext._native import native
from cpr_ext.saving.snapshot import Snapshot

# How long the capture thread sleeps when no staging slot is free.
_POLL_SECONDS = 0.0005


@dataclass(frozen=True)
class Turn:
    """What the training thread may do for a snapshot between two steps.

    Attributes:
        step, num_samples: trained so far.
        max_bytes: about how much to capture; 0: no limit.
        wait_for_slot: wait for the disk, and for a GPU that chooses, instead of returning.
        rows: capture rows; False: the capture thread does.
    """

    step: int
    num_samples: int
    max_bytes: int = 0
    wait_for_slot: bool = True
    rows: bool = True


class CaptureWay:
    """At once: rows are chosen at the start; each is captured with its value at that moment.

    Attributes:
        needs_training_to_wait: rows must be captured before training changes them.
    """

    needs_training_to_wait = True

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def begin(self, turn: Turn) -> None:
        """Choose rows, or begin to."""
        self.snapshot.is_at_once = True
        self.snapshot.choose_rows()

    def advance(self, turn: Turn) -> CaptureWay:
        """Choose and capture rows; return the way in which the snapshot continues."""
        if turn.rows:
            self.snapshot.capture_rows(
                turn.step, max_bytes=turn.max_bytes, wait_for_slot=turn.wait_for_slot
            )
        return self

    def run(self, step: int, stop: native.StopFlag) -> None:
        """Do what can be done until ``stop`` is set; something is, however soon that is."""
        while self.snapshot.has_rows_left:
            progressed = self.snapshot.capture_rows(
                step, max_bytes=0, wait_for_slot=False, stop=stop
            )
            if stop.is_set():
                return
            if not progressed:
                time.sleep(_POLL_SECONDS)


class ShardByShard(CaptureWay):
    """The rows of a shard are chosen when its turn comes to be captured."""

    def begin(self, turn: Turn) -> None:
        """Let GPUs choose."""
        self.snapshot.begin_choosing()


class CopyOnWrite(CaptureWay):
    """All rows are captured with their values at one step, however long that takes.

    Before training changes a row that waits, the row is copied.
    """

    def begin(self, turn: Turn) -> None:
        """Choose rows; the step is this one."""
        self.snapshot.rows.begin_when_chosen = False
        self.snapshot.choose_rows()
        self.snapshot.fix_step(turn.step, turn.num_samples)


class ChooseFirst(CaptureWay):
    """The rows are chosen while training runs; after that, :class:`CopyOnWrite`."""

    def begin(self, turn: Turn) -> None:
        """Leave all to the capture thread."""

    def advance(self, turn: Turn) -> CaptureWay:
        """Choose; rows chosen and those still to be captured must be of one step."""
        if turn.rows:
            self.snapshot.choose_rows(one_table=turn.max_bytes > 0)
        if not self.snapshot.rows.are_chosen:
            return self
        self.snapshot.fix_step(turn.step, turn.num_samples)
        return CopyOnWrite(self.snapshot).advance(turn)

    def run(self, step: int, stop: native.StopFlag) -> None:
        """Choose only."""
        self.snapshot.choose_rows(stop)


class DeviceCopy(CaptureWay):
    """GPUs choose the rows while training runs, and copy them at one step.

    The commit thread takes them from there to the disk. Without the memory for the copy the
    snapshot continues in another way.

    Args:
        max_bytes: limit of the memory for the copy.
        is_of_one_step: all rows must be of one step.
        chooses_at_once: that step is the one that begins the snapshot.
    """

    needs_training_to_wait = False

    def __init__(
        self, snapshot: Snapshot, max_bytes: int, *, is_of_one_step: bool, chooses_at_once: bool
    ) -> None:
        super().__init__(snapshot)
        self._max_bytes = max_bytes
        self._is_of_one_step = is_of_one_step
        self._chooses_at_once = chooses_at_once

    def begin(self, turn: Turn) -> None:
        """Let GPUs choose."""
        self.snapshot.rows.begin_when_chosen = False
        self.snapshot.begin_choosing()
        if self._chooses_at_once:
            self.snapshot.choose_rows()

    def advance(self, turn: Turn) -> CaptureWay:
        """Copy the rows once they are chosen."""
        self.snapshot.choose_rows(wait=turn.wait_for_slot)
        if not self.snapshot.rows.are_chosen:
            return self
        if self.snapshot.gather(turn.step, turn.num_samples, self._max_bytes):
            return self
        self.snapshot.rows.begin_when_chosen = True
        if not self._is_of_one_step:
            return ShardByShard(self.snapshot).advance(turn)
        return CaptureWay(self.snapshot).advance(Turn(turn.step, turn.num_samples))
