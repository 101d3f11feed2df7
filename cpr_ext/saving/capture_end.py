"""What is done once per snapshot, when all of its rows are captured."""

from __future__ import annotations

from cpr_ext.errors import SnapshotError
from cpr_ext.saving.claims import Claims
from cpr_ext.saving.snapshot import Snapshot
from cpr_ext.tracking.inventory import Inventory

_TABLES_CHECKED = 4  # training waits for it


class CaptureEnd:
    """Compares some rows, and sees what training carries on besides rows.

    Args:
        inventory: knows what no snapshot holds.
        claims: revokes those that a comparison refutes.
    """

    def __init__(self, inventory: Inventory, claims: Claims) -> None:
        self._inventory = inventory
        self._claims = claims
        self._had_rows = self._is_looked = self._is_checked = False

    def restart(self) -> None:
        """Begin another snapshot."""
        self._had_rows = self._is_looked = self._is_checked = False

    def look(self) -> None:
        """See what no row holds; the dense part must not be copied before."""
        if not self._is_looked:
            self._is_looked = True
            self._inventory.look()

    def check(self, snapshot: Snapshot) -> None:
        """Compare some rows, after the last was captured; give the snapshot up if one differs."""
        self.look()
        if self._is_checked:
            return
        self._is_checked = True
        if self._claims.check_some(snapshot, _TABLES_CHECKED):
            snapshot.give_up(SnapshotError("rows of it changed unseen; see the warning"))

    def is_now(self, snapshot: Snapshot) -> bool:
        """Return whether the last rows were captured since the last call, made once per step."""
        had_rows, self._had_rows = self._had_rows, snapshot.has_rows_left
        return had_rows and not self._had_rows
