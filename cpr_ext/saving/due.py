"""When the next snapshot is due, and whether snapshots are due faster than the disk takes them."""

from __future__ import annotations

import time

from cpr_ext.metrics.run_state import RunState
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.schedules.intervals import Progress

logger = logger_of("saving")
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
