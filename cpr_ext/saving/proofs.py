"""Which full-recovery points a pass of the scrub has proven, and which a difference revokes.

A snapshot that claims to be complete claims that rows which are not in it equal their saved state.
A pass that begins after it and finds no difference proves that, for all rows that training has not
changed since. A difference says that a row changed at some time since the last pass, so no claim
since then holds. A base snapshot captured at once is an exception: it holds every row.

A base snapshot records the hashes of all rows again, changed ones too. So no later pass can prove
the points before it.
"""

from __future__ import annotations

from cpr_ext.saving.snapshot import Snapshot


class Proofs:
    """Full-recovery points that wait for a pass; used on the training thread."""

    def __init__(self) -> None:
        self._waiting: list[Snapshot] = []
        self._older_than_pass: list[Snapshot] = []
        self._superseded: list[Snapshot] = []  # cannot be proven, but revoked

    def begin_pass(self) -> None:
        """Note that a pass begins."""
        self._older_than_pass = list(self._waiting)

    def begin_base(self) -> None:
        """Note that a base snapshot begins to record hashes."""
        self._superseded += self._waiting
        self._waiting, self._older_than_pass = [], []

    def finish_pass(self) -> None:
        """Note that a pass has ended without a difference; the next one begins."""
        for snapshot in self._older_than_pass:
            snapshot.is_scrubbed = True
        self._waiting = [each for each in self._waiting if not each.is_scrubbed]
        self._superseded = []
        self.begin_pass()

    def forget(self) -> None:
        """Note that no pass can prove the snapshots so far."""
        self._waiting, self._older_than_pass, self._superseded = [], [], []

    def add(self, snapshot: Snapshot) -> None:
        """Note that a snapshot is committed."""
        if not snapshot.is_complete:
            return
        if snapshot.kind == "base" and snapshot.is_at_once:
            snapshot.is_scrubbed = True
        else:
            self._waiting.append(snapshot)

    def revoke(self, in_flight: Snapshot | None) -> list[int]:
        """Take back what no pass has proven; return the numbers of those snapshots."""
        revoked = [*self._superseded, *self._waiting]
        if in_flight is not None and in_flight.is_complete:
            revoked = [*revoked, in_flight]
        for snapshot in revoked:
            snapshot.is_complete = False
        self.forget()
        return [snapshot.number for snapshot in revoked]
