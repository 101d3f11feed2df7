"""Which snapshots must be of all rows."""

from __future__ import annotations

from collections.abc import Sequence

from cpr_ext._native import native
from cpr_ext.errors import SnapshotError
from cpr_ext.saving.selection import SnapshotKind
from cpr_ext.state.table import Table, is_row_state
from cpr_ext.storage.store import Store

ArrayNames = dict[str, list[str]]


class RebasePolicy:
    """Knows what the store's base snapshot holds and what was written since.

    Args:
        rebase_after: a base is due once partial snapshots have written this many times the bytes
            of the last one; None: never.
    """

    def __init__(self, store: Store, tables: Sequence[Table], rebase_after: float | None) -> None:
        self._store = store
        self._tables = list(tables)
        self._rebase_after = rebase_after
        self._base_bytes = 0
        self._partial_bytes = 0
        self._base_arrays: ArrayNames | None = None
        self._names: ArrayNames | None = None  # as of the last call, of tables without keys
        self._states = native.TensorVersions(len(tables), is_row_state)
        self._has_failed = False
        # A base that failed leaves clean rows without a hash, so no snapshot can be checked until
        # there is one. On a full disk a partial one may have room: the next is that.
        self._owes_base = self._is_after_base = False

    def array_names(self) -> ArrayNames:
        """Return the arrays of a row now, by table: an optimizer may add to them."""
        if self._names is not None and self._states.have_same_tensors(self._tables):
            return self._names
        names = {table.name: table.array_names() for table in self._tables}
        if all(table.slots is None for table in self._tables):
            self._states.read(self._tables, range(len(self._tables)))
            self._names = names
        return names

    def next_kind(self) -> SnapshotKind:
        """Return ``base`` if partial snapshots could not be recovered, or are too many."""
        if not self.has_base:
            return "base"
        is_outgrown = (
            self._rebase_after is not None
            and self._base_bytes > 0
            and self._partial_bytes > self._rebase_after * self._base_bytes
        )
        is_owed = self._owes_base and not self._is_after_base
        return "base" if is_outgrown or is_owed else "partial"

    @property
    def has_base(self) -> bool:
        """Partial snapshots of rows as they are now could be recovered."""
        return not self._store.is_empty and self._base_arrays == self.array_names()

    @property
    def is_due_at_once(self) -> bool:
        """There is nothing to recover yet, and no attempt has failed: then the schedule decides."""
        return self._store.is_empty and not self._has_failed

    def note_committed(self, kind: SnapshotKind, file_bytes: int, arrays: ArrayNames) -> None:
        """Record that a snapshot of these arrays is durable."""
        self._is_after_base = False
        if kind == "base":
            self._owes_base = False
            self._base_arrays = arrays
            self._base_bytes, self._partial_bytes = file_bytes, 0
        else:
            self._partial_bytes += file_bytes

    def note_failed(self, kind: SnapshotKind, error: Exception) -> None:
        """Record a failed snapshot. One that was aborted for a change of the model is due again."""
        if kind == "base":
            self._owes_base = self._is_after_base = True
        was_given_up = isinstance(error, SnapshotError)
        self._has_failed = self._has_failed or (kind == "base" and not was_given_up)

    def forget_base(self) -> None:
        """Require a base snapshot: rows of the model differ from those of the store."""
        self._base_arrays = None

    def note_recovered(self) -> None:
        """Record that the model equals the newest snapshots of its store."""
        self._base_arrays = self.array_names()
        self._owes_base = False
        self.measure_store()

    def measure_store(self) -> None:
        """Recompute the bytes of base and partial segments, after a roll-back."""
        manifest, newest = self._store.manifest, self._store.last_snapshot
        records = manifest.at(newest)
        self._base_bytes = sum(r.file_bytes for r in records if r.kind == "base")
        self._partial_bytes = sum(r.file_bytes for r in records if r.kind != "base")
