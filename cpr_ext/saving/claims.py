"""What snapshots claim: to be complete, and proven. What confirms a claim, what takes it back.

Rows that no snapshot holds are claimed to be as saved. The scrub compares them with hashes of what
was saved, and a round trip reads files back. A difference revokes the claim, on disk too, and all
rows of the table count as changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from cpr_ext.errors import SnapshotFailedWarning, StorageError, StoreError
from cpr_ext.metrics.run_state import RunState
from cpr_ext.runtime.log_text import encodable, logger_of
from cpr_ext.saving.proofs import Proofs
from cpr_ext.saving.rebase_policy import RebasePolicy
from cpr_ext.saving.round_trip import DifferenceError, RoundTrips, bytes_of
from cpr_ext.saving.scrub import Scrub
from cpr_ext.saving.segment_capture import WriteOptions
from cpr_ext.saving.selection import SnapshotKind
from cpr_ext.saving.snapshot import Snapshot
from cpr_ext.saving.table_scrub import ChangedRow
from cpr_ext.state.table import Table
from cpr_ext.storage.commit_thread import CommitThread
from cpr_ext.storage.store import Store
from cpr_ext.tracking.row_ranges import RowSpans
from cpr_ext.tracking.table_watch import TableWatch
from cpr_ext.tracking.trackers import Tracker

logger = logger_of("saving")

_MOST_UNPROVEN = 1000  # older ones are superseded by then


class Claims:
    """The claims of one store's snapshots; every call comes from the training thread.

    Args:
        watch: gets what changed although nothing saw it.
        write: how segments are written, and so read back.

    Attributes:
        scrub: finds rows that changed although nothing saw it.
        round_trips: reads snapshots back on the commit thread.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        trackers: Mapping[str, Tracker],
        store: Store,
        account: RunState,
        rebase: RebasePolicy,
        committer: CommitThread,
        watch: TableWatch,
        scrub: Scrub,
        write: WriteOptions,
    ) -> None:
        self.scrub = scrub
        self.round_trips = RoundTrips(
            store.directory,
            scrub,
            committer,
            direct_io=write.direct_io,
            precision=write.precision,
        )
        self._proofs = Proofs()
        self._unproven: list[Snapshot] = []  # complete, and not recorded as proven
        self._is_open = False  # a snapshot has begun, and was not committed
        self._may_differ = False  # a hash from its newest saved row: a capture was not saved
        self._tables = {table.name: table for table in tables}
        self._trackers = trackers
        self._store = store
        self._account = account
        self._rebase = rebase
        self._committer = committer
        self._watch = watch

    def restart(
        self, spans_of: Callable[[Table], RowSpans] | None = None, *, are_newest: bool
    ) -> None:
        """Note that rows were restored: as far as they count as clean, a store has them so.

        Args:
            spans_of: returns which rows of a table these are; None: all.
            are_newest: each came from its newest save, none is older or missing.
        """
        if spans_of is None:  # it may have gone back, also to another store's rows
            self.scrub.record_restored()
            self._is_open = self._may_differ = False
        else:
            are_recorded = are_newest and not (self._is_open or self._may_differ)
            self.scrub.record_restored(spans_of, are_recorded=are_recorded)
        self._may_differ = self._may_differ or not are_newest
        self._begin_proofs()

    def forget(self) -> None:
        """Forget saved rows: restored rows may differ from them."""
        self.scrub.forget()
        self._begin_proofs()

    def _begin_proofs(self) -> None:
        self._proofs.begin_pass()
        self._unproven = []
        self._committer.call(self.round_trips.drop).result()

    def begin_snapshot(self, kind: SnapshotKind) -> None:
        """Note that a snapshot begins, and that rows are recorded as it captures them."""
        self.scrub.begin_snapshot()
        self._may_differ, self._is_open = self._may_differ or self._is_open, True
        if kind == "base":
            self._proofs.begin_base()

    def note_committed(self, snapshot: Snapshot) -> None:
        """Note that a snapshot is committed."""
        self._is_open = False
        self._may_differ = self._may_differ and snapshot.kind != "base"
        if snapshot.kind == "base" and not self.scrub.is_known:
            self.scrub.is_known = True  # all rows were recorded
            self._proofs.forget()
        self._proofs.add(snapshot)
        if snapshot.is_complete:
            self._unproven = [*self._unproven[1 - _MOST_UNPROVEN :], snapshot]

    def note_step(self, in_flight: Snapshot | None) -> None:
        """Compare the next rows of a pass if they are due, unless a snapshot is being captured."""
        self.scrub.note_step()
        is_capturing = in_flight is not None and in_flight.state == "capturing"
        if is_capturing or not (self.scrub.is_due() and self._watch.looks_unchanged()):
            return
        passes = self.scrub.num_passes
        found = self._note_changed(self.scrub.advance(), in_flight)
        if not found and self.scrub.num_passes != passes:
            self._note_pass()
            for table in self.scrub.take_trusted():
                kind = type(table.optimizer).__name__
                text = "table '%s': a %s leaves rows without a gradient alone; rows count now"
                logger.info(text, table.name, kind)

    def compare_all(self) -> list[ChangedRow]:
        """Compare all rows that count as clean now; return one of each table that differs.

        A snapshot that is being read back is read to its end first. What is proven then is
        recorded when this returns. No snapshot is in flight.
        """
        self._committer.call(self.round_trips.finish).result()
        self._settle_round_trips()
        self._watch.check(replaced=True)
        self.scrub.restart()
        self._proofs.begin_pass()
        found = self._note_changed(self.scrub.run_pass())
        if not found:
            self._note_pass()
        self._record_proofs()
        self._committer.call(lambda: None).result()
        return found

    def _note_pass(self) -> None:
        self._account.metrics.scrub_passes += 1
        if not self.scrub.is_known:
            self._proofs.forget()
        elif self.scrub.was_whole:
            self._proofs.finish_pass()
        else:  # a table that is not compared proves nothing
            self._proofs.begin_pass()

    def check_some(self, in_flight: Snapshot | None, most_tables: int | None = None) -> bool:
        """Return whether a row that counts as clean was found to be changed.

        Args:
            in_flight: its claim is revoked then, too.
            most_tables: compare rows of no more; None: of all.
        """
        return bool(self._note_changed(self.scrub.check_some(most_tables=most_tables), in_flight))

    def _note_changed(
        self, found: list[ChangedRow], in_flight: Snapshot | None = None
    ) -> list[ChangedRow]:
        if found:  # what PyTorch has counted is reported as such
            self._watch.check(replaced=True)
            found = [changed for changed in found if self._watch.changes.is_proven(changed.table)]
        for changed in found:
            self._watch.changes.record_hidden(
                changed.table,
                f"row {changed.row_id} counts as unchanged since it was saved, but differs: "
                "something writes past PyTorch, such as weight.data or another library",
            )
        if found:
            self._account.metrics.rows_changed_unseen += len(found)
            self._revoke(self._proofs.revoke(in_flight), "rows had changed unseen")
            self.scrub.restart()
        return found

    def settle(self) -> None:
        """Take back claims that were found to be false, and record which are proven by now."""
        self._settle_round_trips()
        self._record_proofs()

    def _settle_round_trips(self) -> None:
        """Take back the claim of points whose files are not what was captured."""
        metrics = self._account.metrics
        metrics.round_trips = self.round_trips.num_done
        for difference, points in self.round_trips.take_found():
            metrics.round_trips_failed += 1
            self._rebase.forget_base()
            for snapshot in points:
                snapshot.is_complete = False
            numbers = [snapshot.number for snapshot in points]
            self._revoke(numbers, "their files are not what was captured")
            text = encodable(
                f"snapshots {numbers} in '{self._store.directory}' are not what was captured: "
                f"{difference}{self._arrays_of(difference)}. The next snapshot is of all rows"
            )
            logger.error(text)
            warnings.warn(text, SnapshotFailedWarning, stacklevel=5)

    def _record_proofs(self) -> None:
        """Have the store record which snapshots are proven by now; waits for nothing."""
        if not self._unproven:
            return
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
        """Name the arrays of a row that differ, if memory has it as a recovery would restore it."""
        name, row_id = difference.table, difference.row_id
        if name is None or row_id < 0 or not self.scrub.restores_what_is_live(name):
            return ""
        if not self._trackers[name].is_clean(row_id, row_id + 1):
            return ""
        live = self._tables[name].arrays()
        names = [
            array
            for array, read in difference.arrays.items()
            if not torch.equal(bytes_of(live[array][row_id]), bytes_of(read))
        ]
        return f" (arrays: {', '.join(names) or 'none, its hash alone'})"

    def _revoke(self, numbers: list[int], reason: str) -> None:
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
            logger.warning("snapshots %s are no full-recovery points: %s", numbers, reason)
