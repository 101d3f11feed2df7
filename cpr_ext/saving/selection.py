"""Which rows go into a snapshot: all (base), or the most important ones (partial)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cpr_ext._native import native
from cpr_ext.runtime.cuda import record_on_stream
from cpr_ext.saving.priorities import AllRows, Priority
from cpr_ext.state.table import Table, moving_tables
from cpr_ext.tracking.key_watch import KeyWatch

SnapshotKind = Literal["base", "partial"]  # of all rows, or of selected ones
RowIds = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class Selection:
    """The rows of a table to save: ascending ``row_ids`` (n,), or None: all.

    Attributes:
        has_room: more rows might have been chosen: all that were dirty are.
        chosen: the native ``PendingRows`` that still has ``row_ids`` on a GPU; None: nothing has.
    """

    table: Table
    tracker: native.RowTracker
    row_ids: RowIds | None = None
    has_room: bool = True
    chosen: native.PendingRows | None = None

    @property
    def num_rows(self) -> int:
        """Rows selected."""
        return self.table.num_embeddings if self.row_ids is None else len(self.row_ids)

    def forget(self) -> None:
        """Free the row ids: all is saved."""
        self.row_ids, self.chosen = np.empty(0, np.int64), None


class Selector:
    """Applies a priority to the tables of a model.

    Args:
        trackers: the tracker of each table, by table name.
        prioritized: names of the tables to which the priority applies; the others are saved whole.
        any_changed: whether a table was changed outside, and its rows do not count as dirty yet.
        keys: knows slots that must be saved before all others.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        trackers: Mapping[str, native.RowTracker],
        priority: Priority,
        prioritized: Collection[str],
        pool: native.ThreadPool | None,
        any_changed: Callable[[], bool],
        keys: KeyWatch,
    ) -> None:
        self._keys = keys
        self.any_changed = any_changed
        self.tables = tables
        self._trackers = trackers
        self._priority = priority
        self._prioritized = prioritized
        self._pool = pool

    def num_dirty(self) -> int:
        """Count the dirty rows of all tables."""
        return sum(native.num_dirty_of(list(self._trackers.values())))

    def moving(self) -> frozenset[str]:
        """Return the names of the tables whose optimizer now moves rows without a gradient."""
        return moving_tables(self.tables)

    def base(self, table: Table) -> Selection:
        """Return all rows of a table."""
        self._keys.must_save(table)  # raises for wrong keys
        return Selection(table, self._trackers[table.name])

    def describe_keys(self) -> dict[str, dict[str, int | None]]:
        """Return what a snapshot notes of the keys of keyed tables."""
        return self._keys.describe()

    def record_weights(self) -> None:
        """Record in PyTorch that the current streams read the weights, to choose rows."""
        for table in self.tables:
            table.arrays()  # the newest values are in it then
            record_on_stream(table.weight)

    def partial(
        self,
        table: Table,
        moving: Collection[str],
        stop: native.StopFlag | None = None,
        *,
        all_dirty: bool = False,
    ) -> Selection | None:
        """Choose the rows of a table to save first, at most the fraction if a priority applies.

        Args:
            moving: names of tables whose optimizer moves rows without a gradient.
            stop: a native ``StopFlag``. Returns None if it is set before the rows are found.
            all_dirty: choose all dirty rows, whatever the priority.
        """
        tracker, num_rows = self._trackers[table.name], table.num_embeddings
        must = None if table.slots is None else self._keys.must_save(table)
        is_prioritized = all_dirty or table.name in self._prioritized
        saves_all = all_dirty or self._saves_all
        if not is_prioritized or (saves_all and table.name in moving):
            return Selection(table, tracker)
        if saves_all:
            found, budget = tracker.dirty_rows(), num_rows + 1
        else:
            budget = self._priority.budget(num_rows)
            num_must = 0 if must is None else len(must)
            ids = tracker.select(
                *(0, num_rows, max(0, budget - num_must)),
                weight=table.weight,
                pool=self._pool,
                stop=None if num_must else stop,
            )
            if ids is None:
                return None
            found = ids
        if must is not None:
            found = np.union1d(found, must)
        return Selection(table, tracker, found, len(found) < budget)

    def begin_partial(self, table: Table) -> native.PendingRows | None:
        """Let a GPU choose the rows during training, for :meth:`end_partial`.

        Returns:
            None where there is nothing to wait for, or some rows are chosen by their keys.
        """
        if table.name not in self._prioritized or self._saves_all or table.slots is not None:
            return None
        budget = self._priority.budget(table.num_embeddings)
        tracker = self._trackers[table.name]
        return tracker.begin_select(0, table.num_embeddings, budget, weight=table.weight)

    def end_partial(self, table: Table, pending: native.PendingRows) -> Selection:
        """Return the rows that a GPU has chosen; waits until it has."""
        row_ids = pending.read()
        has_room = len(row_ids) < self._priority.budget(table.num_embeddings)
        return Selection(table, self._trackers[table.name], row_ids, has_room, pending)

    @property
    def _saves_all(self) -> bool:
        return isinstance(self._priority, AllRows) and self._priority.fraction == 1

    def are_complete(
        self, selections: Sequence[Selection], moving: Collection[str], *, is_captured: bool
    ) -> bool:
        """Return whether no row is dirty once all are captured.

        Args:
            selections: of all tables.
            moving: names of tables whose optimizer moves rows without a gradient.
            is_captured: all rows of the selections are captured, so that no tracker has them.
        """
        partial = [each for each in selections if each.row_ids is not None]
        if self.any_changed():
            return False
        if any(each.table.name in moving for each in partial):
            return False
        if not is_captured:
            num_dirty = native.num_dirty_of([each.tracker for each in partial])
            return num_dirty == [each.num_rows for each in partial]
        # Rows of whole tables may have changed since they were captured, in the same step.
        return native.are_clean(
            [each.tracker for each in selections],
            [0] * len(selections),
            [each.table.num_embeddings for each in selections],
        )
