"""What snapshots claim: to be complete. A claim is granted after a check, and never taken back.

A snapshot that holds all dirty rows at one step is a candidate. If clean rows equal what was saved,
the store then holds every row of that step. A check compares them with the hashes of what was
saved; a row that is about to change is compared before. The check ends without a
difference: the snapshot is complete. A difference: it never is, and the table counts as changed as
a whole, so that the next snapshot saves it. Of rows that a candidate itself captured, between two
steps, there is nothing to compare.

One check is made at a time, by the capture thread where there is one; a candidate that comes in
between is not checked. After other snapshots rows are compared, too, for the next one's sake.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from cpr_ext._native import native
from cpr_ext.errors import StorageError, StoreError
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.saving.run_state import RunState
from cpr_ext.saving.saved_hashes import ALL_BYTES, ChangedRow, SavedHashes, UnknownRowsError
from cpr_ext.saving.snapshot import Snapshot
from cpr_ext.state.table import Table
from cpr_ext.storage.commit_thread import CommitThread
from cpr_ext.storage.store import Store
from cpr_ext.tracking.outside_changes import RowSpans
from cpr_ext.tracking.table_events import TableEvents
from cpr_ext.tracking.table_watch import TableWatch

logger = logger_of("saving")

#: The share of the time that a check takes. Where rows that are about to change take longer to
#: compare, as in each step until the check ends, it takes as long as they: so it ends soon.
SHARE = 0.01
# Training waits for it: at least for some tens of microseconds in each step, at most for longer.
_SLICE_BYTES = 256 << 10
_LONGEST_SECONDS = 4e-3
_BYTES_PER_SECOND = 4e9  # until it is measured
_WINDOW_BYTES = 4 << 20  # compared at a time while training only reads the tables
# A check begins the time of so many until the next may begin; so many more, after which a snapshot
# is checked that can claim nothing. Where training waits for points, each is checked. Time is that
# of the thread: a busy machine takes no more of it.
_PAUSE_OF_CHECKS = (50, 500)
_SHORT_SECONDS = 0.02  # such a check has no need of that


class _Outcome(NamedTuple):
    """What came of comparing rows.

    Attributes:
        found: rows that differ.
        has_ended: the check's pass.
        unknown: why rows could not be compared.
    """

    found: list[ChangedRow]
    has_ended: bool = False
    unknown: str = ""


class Claims:
    """The claims of one store's snapshots; all calls but :meth:`run` come from the training thread.

    Args:
        watch: gets what changed although nothing saw it.
        events: report which rows are about to change, while a check is made.
        has_windows: :meth:`run` is called while training only reads the tables.

    Attributes:
        hashes: of saved rows.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        store: Store,
        account: RunState,
        committer: CommitThread,
        watch: TableWatch,
        hashes: SavedHashes,
        events: TableEvents,
        *,
        has_windows: bool = False,
    ) -> None:
        self.hashes = hashes
        self._tables = tables
        self._store = store
        self._account = account
        self._committer = committer
        self._watch = watch
        self._events = events
        self._checked: Snapshot | None = None  # whose check is being made
        self._is_comparing = False  # its pass has begun
        self._early: list[ChangedRow] = []  # rows that differed when they were about to change
        self._early_seconds = 0.0  # that it took to compare them, in this step
        self._has_windows = has_windows
        self._outcome: _Outcome | None = None  # of the last window
        size_bytes = sum(table.weight.nbytes for table in tables)
        self._check_began = time.perf_counter()  # the last one, in windows
        self._check_seconds = size_bytes / _BYTES_PER_SECOND if has_windows else 0.0
        self._has_checked = False
        self._last_slice = 0.0
        self._bytes_per_second = _BYTES_PER_SECOND

    def restart(self, spans_of: Callable[[Table], RowSpans] | None = None) -> None:
        """Note that rows were restored: as far as they count as clean, a store has them so.

        Args:
            spans_of: returns which rows of a table these are; None: all.
        """
        self.end()
        self.hashes.record_restored(spans_of)

    def forget(self) -> None:
        """Forget saved rows: restored rows may differ from them."""
        self.end()
        self.hashes.forget()

    def begin_snapshot(self) -> None:
        """Look whether rows have changed, before the rows of a snapshot are chosen."""
        if (checked := self._checked) is not None and checked.state != "capturing":
            if not self._is_comparing:
                self._advance(_SLICE_BYTES)  # what its capture has left to compare goes now
            self._give_up_changed()

    def _give_up_changed(self) -> None:
        """End a check of rows that have changed before they were compared, as was seen."""
        checked, changes = self._checked, self._watch.changes
        if checked is None:
            return
        for table in changes.moved():
            if table.name in checked.compared:
                text = "snapshot %d is not checked: rows of '%s' without a gradient changed since"
                logger.info(text, checked.number, table.name)
                checked.is_candidate = False
                self.end()
                return

    def note_captured(self, snapshot: Snapshot) -> None:
        """Note that all rows of a snapshot are chosen or captured, and begin its check."""
        checked = self._checked
        if checked is not None and checked is not snapshot and self.hashes.is_overwritten:
            self._advance(_SLICE_BYTES)  # which ends that check
            checked = self._checked
        if snapshot is checked:
            self.note_step()
            return
        if snapshot.last_step < 0 or snapshot.is_complete:
            return
        if snapshot.is_candidate and not snapshot.compared:
            snapshot.is_complete = True
        elif not self._may_check(snapshot):
            snapshot.is_candidate = False
        elif checked is None or (snapshot.is_candidate and not self._must_go_on(checked)):
            if checked is not None and checked.is_candidate:
                logger.info("snapshot %d is not checked: a newer one is", checked.number)
                checked.is_candidate = False
            self.end()
            self._checked, self._last_slice = snapshot, time.perf_counter()
            self._check_began, self._check_seconds = self._last_slice, 0.0
            self._early_seconds = 0.0
            self._has_checked = True
            if snapshot.is_candidate:
                self._events.rows_change.append(self._compare_changing)
            self.note_step()
        elif snapshot.is_candidate:
            snapshot.is_candidate = False
            logger.info(
                "snapshot %d is not checked, as the check of snapshot %d is still made: it takes "
                "longer than the time between snapshots",
                *(snapshot.number, checked.number),
            )

    def _must_go_on(self, checked: Snapshot) -> bool:
        """Return whether a newer candidate has to wait for this check."""
        return checked.is_candidate and (self._is_comparing or not self._has_windows)

    def _may_check(self, snapshot: Snapshot) -> bool:
        """Return whether checks have taken little enough of the time so far."""
        if self._check_seconds < _SHORT_SECONDS or (
            snapshot.is_candidate
            and (not self._has_checked or self._account.schedule.when_busy == "wait")
        ):
            return True
        pause = self._check_seconds * _PAUSE_OF_CHECKS[not snapshot.is_candidate]
        if time.perf_counter() >= self._check_began + pause:
            return True
        if snapshot.is_candidate:
            text = "snapshot %d is not checked: a check takes %.2f s, so one is made every %.0f s"
            logger.info(text, snapshot.number, self._check_seconds, pause)
        return False

    def note_step(self) -> None:
        """Compare the next rows of a check, once its snapshot is captured."""
        checked = self._checked
        if checked is None or checked.state == "capturing" or not self._watch.looks_unchanged():
            return
        early, self._early_seconds = self._early_seconds, 0.0
        self._check_seconds += early
        self._give_up_changed()
        if self._checked is None:
            return
        if self._has_windows:
            if self._outcome is not None or self._early:
                self._advance(0)  # what the last window found
            return
        started, compared = time.perf_counter(), self.hashes.bytes_compared
        begun = time.thread_time()
        seconds = min(max(SHARE * (started - self._last_slice), early), _LONGEST_SECONDS)
        self._advance(max(_SLICE_BYTES, int(seconds * self._bytes_per_second)))
        self._last_slice = time.perf_counter()
        self._check_seconds += time.thread_time() - begun
        if (compared := self.hashes.bytes_compared - compared) >= _SLICE_BYTES:
            self._bytes_per_second = compared / (self._last_slice - started)

    @property
    def has_rows_left(self) -> bool:
        """Whether :meth:`run` has something to do."""
        return self._checked is not None and self._checked.state != "capturing"

    def run(self, stop: native.StopFlag) -> None:
        """Compare rows of a check until ``stop`` is set, some at least; on any thread."""
        begun = time.thread_time()
        while self._outcome is None:
            outcome = self._compare(_WINDOW_BYTES)
            if outcome.found or outcome.has_ended or outcome.unknown:
                self._outcome = outcome
            if stop.is_set():
                break
        self._check_seconds += time.thread_time() - begun

    def finish(self) -> None:
        """Make the check to its end, now; no optimizer is in the middle of its step."""
        checked = self._checked
        if checked is not None and checked.state != "capturing":
            self._watch.check(replaced=True)
            self._give_up_changed()
        if self._checked is not None and self._checked.state != "capturing":
            self._advance(ALL_BYTES)

    def _compare(self, max_bytes: int) -> _Outcome:
        assert self._checked is not None
        try:
            if not self._is_comparing:
                self._is_comparing = True
                self.hashes.begin_pass(self._checked.compared)
            return _Outcome(*self.hashes.advance(max_bytes))
        except UnknownRowsError as reason:
            return _Outcome([], unknown=str(reason))

    def _advance(self, max_bytes: int) -> None:
        """Compare about so many bytes of rows, and take note of what was found so far."""
        checked = self._checked
        assert checked is not None
        early, self._early = self._early, []
        outcome, self._outcome = self._outcome, None
        if early:
            outcome = _Outcome(early)
        elif outcome is None:
            outcome = self._compare(max_bytes)
        if outcome.unknown:
            logger.info("snapshot %d is not checked: %s", checked.number, outcome.unknown)
            checked.is_candidate = False
            self.end()
        elif outcome.found:
            self._deny(outcome.found)
        elif outcome.has_ended:
            self._account.metrics.checks += 1
            self.end()
            checked.is_complete = checked.is_candidate
            if checked.is_done:
                self.record(checked)

    def check(self) -> list[ChangedRow]:
        """Compare all rows that count as clean now; return one of each table that differs.

        No snapshot is in flight, and no optimizer in the middle of its step.
        """
        self.finish()
        self._watch.check(replaced=True)
        known = [t.name for t in self._tables if t.updates_only_looked_up_rows()]
        found: list[ChangedRow] = []
        num_unknown = 0
        for name in known:
            try:
                self.hashes.begin_pass([name])
                found += self.hashes.advance(ALL_BYTES)[0]
            except UnknownRowsError as reason:
                num_unknown += 1
                logger.info("not all rows were compared: %s", reason)
        self.hashes.end_pass()
        self._account.metrics.checks += not found and not num_unknown
        self._deny(found)
        self._committer.call(lambda: None).result()
        return found

    def _compare_changing(self, tables: Sequence[Table], row_ids: Sequence[torch.Tensor]) -> None:
        """Compare rows that are about to change: later nobody knows what they were."""
        assert self._checked is not None
        begun, compared = time.thread_time(), self._checked.compared
        changing = zip(tables, row_ids, strict=True)
        self._early += self.hashes.check_changing(c for c in changing if c[0].name in compared)
        self._early_seconds += time.thread_time() - begun

    def _deny(self, found: list[ChangedRow]) -> None:
        """Take note of rows that differ: no check that is being made can be passed."""
        if not found:
            return
        if (checked := self._checked) is not None and checked.is_candidate:
            checked.is_candidate = False
            logger.warning("snapshot %d is no full-recovery point: rows differ", checked.number)
        self.end()
        changes = self._watch.changes
        self._watch.check(replaced=True)  # what PyTorch has counted is reported as such
        unseen = [each for each in found if not changes.is_changed(each.table)]
        self._account.metrics.rows_changed_unseen += len(unseen)
        for changed in unseen:
            changes.record_hidden(
                changed.table,
                f"row {changed.row_id} counts as unchanged since it was saved, but differs: "
                "something writes past PyTorch, such as weight.data or another library",
            )

    def end(self) -> None:
        """End the check that is being made, if one is."""
        self.hashes.end_pass()
        self._checked, self._is_comparing, self._early = None, False, []
        self._outcome = None
        self._events.rows_change.leave(self._compare_changing)

    def record(self, snapshot: Snapshot) -> None:
        """Have the store record a claim that was granted after its commit; waits for nothing."""
        if snapshot.error is not None or snapshot.is_recorded or not snapshot.is_complete:
            return
        snapshot.is_recorded = True
        self._note_complete(snapshot)
        text = "snapshot %d is a full-recovery point, of step %d"
        logger.info(text, snapshot.number, snapshot.last_step)

        def record() -> None:
            try:
                self._store.note_complete(snapshot.number)
            except (StorageError, StoreError) as error:
                text = "that snapshot %d is complete is not recorded: %s"
                logger.warning(text, snapshot.number, error)

        self._committer.submit(record)

    def note_done(self, snapshot: Snapshot) -> None:
        """Note that a snapshot was committed, or failed."""
        if snapshot.error is not None and snapshot is self._checked:
            self.end()
        if snapshot.error is None and snapshot.is_recorded:
            self._note_complete(snapshot)
        self.record(snapshot)

    def _note_complete(self, snapshot: Snapshot) -> None:
        metrics = self._account.metrics
        metrics.complete_step = max(metrics.complete_step, snapshot.last_step)
