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


class Sweep:
    """Rows are chosen while training runs; each is captured with its value when its turn comes.

    Attributes:
        is_of_one_step: rows must be captured before training changes them.
    """

    is_of_one_step = False

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def begin(self, turn: Turn) -> None:
        """Let GPUs choose."""
        self.snapshot.begin_choosing()

    def advance(self, turn: Turn) -> Sweep:
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


class OneStep(Sweep):
    """Rows and the dense part are those of the step that begins the snapshot.

    They are captured before training changes any of them.
    """

    is_of_one_step = True

    def begin(self, turn: Turn) -> None:
        """Copy the dense part; which rows are dirty stays the same until all are captured."""
        if not self.snapshot.rows.are_all_dirty:
            self.snapshot.choose_rows()
        self.snapshot.fix_step(turn.step, turn.num_samples)


class DeviceCopy(Sweep):
    """GPUs choose the rows while training runs, and copy them at one step.

    The commit thread takes them from there to the disk. Without the memory for the copy the
    snapshot continues as a :class:`Sweep`.

    Args:
        max_bytes: limit of the memory for the copy.
        is_given: that step is the one that begins the snapshot.
    """

    def __init__(self, snapshot: Snapshot, max_bytes: int, *, is_given: bool) -> None:
        super().__init__(snapshot)
        self._max_bytes = max_bytes
        self._is_given = is_given

    def begin(self, turn: Turn) -> None:
        """Let GPUs choose."""
        self.snapshot.begin_choosing()
        if self._is_given:
            self.snapshot.choose_rows()

    def advance(self, turn: Turn) -> Sweep:
        """Copy the rows once they are chosen."""
        self.snapshot.choose_rows(wait=turn.wait_for_slot)
        if not self.snapshot.rows.are_chosen:
            return self
        if self.snapshot.gather(turn.step, turn.num_samples, self._max_bytes):
            return self
        if not self._is_given:
            return Sweep(self.snapshot).advance(turn)
        self.snapshot.fix_step(turn.step, turn.num_samples)
        return OneStep(self.snapshot).advance(Turn(turn.step, turn.num_samples))
