"""The comparison that a snapshot ends with, once all of its rows are captured."""

from __future__ import annotations

from cpr_ext.errors import SnapshotError
from cpr_ext.saving.claims import Claims
from cpr_ext.saving.snapshot import Snapshot

_TABLES_CHECKED = 4  # training waits for it


class CaptureEnd:
    """Notices the end of a snapshot's rows, and compares some of them once.

    Args:
        claims: revokes those that the comparison refutes.
    """

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._had_rows = self._is_checked = False

    def restart(self) -> None:
        """Begin another snapshot."""
        self._had_rows = self._is_checked = False

    def check(self, snapshot: Snapshot) -> None:
        """Compare some rows, after the last was captured; give the snapshot up if one differs."""
        if self._is_checked:
            return
        self._is_checked = True
        if self._claims.check_some(snapshot, _TABLES_CHECKED):
            snapshot.give_up(SnapshotError("rows of it changed unseen; see the warning"))

    def is_now(self, snapshot: Snapshot) -> bool:
        """Return whether the last rows were captured since the last call, made once per step."""
        had_rows, self._had_rows = self._had_rows, snapshot.has_rows_left
        return had_rows and not self._had_rows
