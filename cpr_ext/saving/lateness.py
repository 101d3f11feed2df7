"""Whether snapshots are due faster than the disk takes them."""

from __future__ import annotations

from cpr_ext.runtime.log_text import logger_of

logger = logger_of("saving")
#: So many snapshots in a row begin late before it is said: one base takes longer than others.
LATE_IN_A_ROW = 3


class Lateness:
    """Logs one warning if snapshots begin late, one after another.

    A snapshot is late if it begins at the first step at which the one before it is committed.
    """

    def __init__(self) -> None:
        self._was_busy = False
        self._in_a_row = 0

    def note_step(self, *, is_busy: bool, begins: bool, follows_disk: bool) -> None:
        """Record a step.

        Args:
            is_busy: a snapshot is in progress.
            begins: one begins.
            follows_disk: the schedule asks for one snapshot after the other.
        """
        if begins:
            self._in_a_row = self._in_a_row + 1 if self._was_busy and not follows_disk else 0
            if self._in_a_row == LATE_IN_A_ROW:
                logger.warning(
                    "snapshots are due faster than they are written: the last %d began late, as "
                    "soon as the one before was committed. Rows are saved less often than the "
                    "schedule asks for, and a lost shard loses more: use a longer interval, a "
                    "smaller fraction, rounded rows (precision=) or a faster disk",
                    LATE_IN_A_ROW,
                )
        self._was_busy = is_busy
