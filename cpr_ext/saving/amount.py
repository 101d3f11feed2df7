"""How much a snapshot has to capture, and whether that fits into one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from cpr_ext.saving.priorities import Priority
from cpr_ext.saving.selection import SnapshotKind
from cpr_ext.state.table import Table, moving_tables

#: The share of what one step captures, as measured, that is expected to fit into another.
_SHARE_OF_STEP = 0.5
# By which one snapshot may have more rows, for as many updates, than the one before.
_MARGIN = 1.5


class CaptureAmount:
    """Bounds what is dirty by the updates since all dirty rows were last chosen.

    Args:
        prioritized: names of the tables to which the priority applies; others are saved whole.
        count_updates: returns the row updates so far.
        array_names: returns the arrays of a row now, by table; the same object while they are.
        slots_bytes: of all staging slots: as much never waits for the disk.
        overlaps: whether rows are captured while training reads them.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        priority: Priority,
        prioritized: Collection[str],
        count_updates: Callable[[], int],
        array_names: Callable[[], Mapping[str, Sequence[str]]],
        slots_bytes: int,
        *,
        overlaps: bool,
    ) -> None:
        self._tables = tables
        self._priority = priority
        self._prioritized = prioritized
        self._count_updates = count_updates
        self._array_names = array_names
        self._names: Mapping[str, Sequence[str]] | None = None  # of which row_bytes are
        self._row_bytes: list[int] = []
        self._slots_bytes = slots_bytes
        self._overlaps = overlaps
        self._bytes_per_step = 0.0
        self._begun = 0
        self._begun_bound = 0
        self._distinct = 1.0  # bytes of dirty rows, as a share of those of updates
        self._known: int | None = None  # updates when all dirty rows were last chosen

    def begin(self) -> None:
        """Begin a snapshot: its rows are chosen from now on."""
        self._begun = self._count_updates()
        self._begun_bound = self._updated_bytes(max(self._of_rows(), default=0))

    def note_committed(
        self, kind: SnapshotKind, num_bytes: int, num_steps: int, *, has_all: bool
    ) -> None:
        """Note that a snapshot is durable.

        Args:
            num_bytes: captured, within so many steps.
            has_all: all rows that were dirty when they were chosen.
        """
        if has_all and kind == "partial" and self._begun_bound > 0:
            self._distinct = min(1.0, _MARGIN * num_bytes / self._begun_bound)
        self._known = self._begun if has_all else None
        if num_bytes > self._slots_bytes or self._bytes_per_step == 0:
            self._bytes_per_step = num_bytes / max(1, num_steps)

    def forget(self) -> None:
        """Note that more rows may be dirty than were updated."""
        self._known = None

    def bound(self, kind: SnapshotKind, *, all_dirty: bool = False) -> int:
        """Return about how many bytes of rows a snapshot captures at most.

        Args:
            all_dirty: a partial one of all dirty rows, whatever their priority.
        """
        of_rows = self._of_rows()
        whole = changed = 0
        moving = moving_tables(self._tables)
        for table, row_bytes in zip(self._tables, of_rows, strict=True):
            rows, moves = table.num_embeddings, table.name in moving
            if kind == "base" or (moves and (all_dirty or self._priority.fraction == 1)):
                whole += rows * row_bytes
            elif all_dirty:
                changed += rows * row_bytes
            elif table.name not in self._prioritized:
                whole += rows * row_bytes
            else:
                changed += min(rows, self._priority.budget(rows)) * row_bytes
        if self._known is not None:
            updated = self._updated_bytes(max(of_rows, default=0))
            changed = min(changed, int(self._distinct * updated))
        return whole + changed

    def _updated_bytes(self, row_bytes: int) -> int:
        """Return the bytes of all updates since all dirty rows were last chosen; 0: not known."""
        return 0 if self._known is None else row_bytes * (self._count_updates() - self._known)

    def _of_rows(self) -> list[int]:
        """Return the bytes of a row of each table."""
        names = self._array_names()
        if names is not self._names:
            sizes = (t.embedding_dim * t.weight.element_size() for t in self._tables)
            counted = zip(sizes, self._tables, strict=True)
            self._row_bytes = [size * len(names[table.name]) for size, table in counted]
            self._names = names
        return self._row_bytes

    def can_fit(self) -> bool:
        """Return whether all dirty rows may be captured within one step, once few are dirty.

        Of a table whose optimizer moves all rows all are dirty at each step.
        """
        moving = moving_tables(self._tables)
        tables = zip(self._tables, self._of_rows(), strict=True)
        return sum(t.num_embeddings * b for t, b in tables if t.name in moving) <= self._most

    def fits(self, kind: SnapshotKind, *, all_dirty: bool = False) -> bool:
        """Return whether a snapshot is expected to be captured within one step."""
        return self.bound(kind, all_dirty=all_dirty) <= self._most

    @property
    def _most(self) -> float:
        return _SHARE_OF_STEP * self._bytes_per_step if self._overlaps else self._slots_bytes

    def steps(self, kind: SnapshotKind) -> int:
        """Return within about how many steps a snapshot would be captured and written."""
        if self._bytes_per_step == 0:
            return 1
        return math.ceil(self.bound(kind) / self._bytes_per_step)
