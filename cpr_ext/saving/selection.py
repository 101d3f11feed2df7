"""Which rows go into a snapshot: all of a shard (base), or the most important ones (partial)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cpr_ext._native import native
from cpr_ext.runtime.cuda import record_on_stream
from cpr_ext.saving.priorities import AllRows, Priority
from cpr_ext.state.table import Table, shard_row_range
from cpr_ext.tracking.key_watch import KeyWatch
from cpr_ext.tracking.trackers import Tracker, native_trackers

SnapshotKind = Literal["base", "partial"]  # of all rows, or of selected ones
RowIds = np.ndarray[Any, np.dtype[np.int64]]
_BLOCK_ROWS = 1 << 16


@dataclass
class Selection:
    """The rows of a table to save: ascending ``row_ids`` (n,), or all of the range [begin, end).

    Attributes:
        chosen: the native ``PendingRows`` that still has ``row_ids`` on a GPU; None: nothing has.
    """

    table: Table
    tracker: Tracker
    begin: int
    end: int
    row_ids: RowIds | None = None
    chosen: native.PendingRows | None = None

    @property
    def num_rows(self) -> int:
        """Rows selected."""
        return self.end - self.begin if self.row_ids is None else len(self.row_ids)

    def num_dirty(self) -> int:
        """Count the rows that are dirty; of chosen ones all are."""
        if self.row_ids is not None:
            return self.num_rows
        return int(self.tracker.num_dirty(self.begin, self.end))

    def forget(self) -> None:
        """Free the row ids: all is saved."""
        self.row_ids = self.chosen = None
        self.end = self.begin


class Selector:
    """Applies a priority to the tables of a model.

    Args:
        trackers: the tracker of each table, by table name.
        prioritized: names of the tables to which the priority applies; the others are saved whole.
        is_proven: whether every way in which rows of a table could have changed was watched.
        has_kept_still: whether rows of a table, captured piece by piece, are still of one step.
        keys: knows slots that must be saved before all others.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        trackers: Mapping[str, Tracker],
        priority: Priority,
        prioritized: Collection[str],
        num_shards: int,
        pool: native.ThreadPool | None,
        is_proven: Callable[[Table], bool],
        has_kept_still: Callable[[Table], bool],
        keys: KeyWatch,
    ) -> None:
        self._keys = keys
        self._has_kept_still = has_kept_still
        self._is_proven = is_proven
        self._tables = tables
        self._trackers = trackers
        self._priority = priority
        self._prioritized = prioritized
        self._num_shards = num_shards
        self._pool = pool

    @property
    def num_tables(self) -> int:
        """Tables to choose rows from."""
        return len(self._tables)

    def base(self, table: int, shard: int) -> Selection:
        """Return all rows that a shard has of the table of this number."""
        chosen = self._tables[table]
        begin, end = self._range(chosen, shard)
        self._keys.must_save(chosen, begin, end)  # raises for wrong keys
        return Selection(chosen, self._trackers[chosen.name], begin, end)

    def describe_keys(self) -> dict[str, dict[str, int | None]]:
        """Return what a snapshot notes of the keys of keyed tables."""
        return self._keys.describe()

    def record_weights(self) -> None:
        """Record in PyTorch that the current streams read the weights, to choose rows."""
        for table in self._tables:
            table.arrays()  # the newest values are in it then
            record_on_stream(table.weight)

    def partial(
        self,
        table: int,
        shard: int,
        pending: native.PendingRows | None = None,
        stop: native.StopFlag | None = None,
    ) -> Selection | None:
        """Choose the rows to save first, at most the fraction if the table is prioritised.

        Args:
            pending: what :meth:`begin_partial` returned; waits until it is ready.
            stop: a native ``StopFlag``. Once it is set, returns None unless the rows are chosen.
        """
        chosen = self._tables[table]
        if pending is None:
            return self._partial(chosen, shard, stop)
        begin, end = self._range(chosen, shard)
        tracker = self._trackers[chosen.name]
        return Selection(chosen, tracker, begin, end, pending.read(), pending)

    def begin_partial(self, table: int, shard: int) -> Any:
        """Let a GPU choose the rows during training.

        Returns:
            A native ``PendingRows`` for :meth:`partial`; None where there is nothing to wait for.
        """
        chosen = self._tables[table]
        begin, end = self._range(chosen, shard)
        if chosen.name not in self._prioritized or self._saves_all(end - begin):
            return None
        if chosen.slots is not None:
            return None  # some rows are chosen by their keys
        budget = self._priority.budget(end - begin)
        tracker = self._trackers[chosen.name]
        return tracker.begin_select(begin, end, budget, weight=chosen.weight)

    def _saves_all(self, num_rows: int) -> bool:
        return isinstance(self._priority, AllRows) and self._priority.budget(num_rows) == num_rows

    def _partial(self, table: Table, shard: int, stop: native.StopFlag | None) -> Selection | None:
        tracker = self._trackers[table.name]
        begin, end = self._range(table, shard)
        must = self._keys.must_save(table, begin, end)
        if table.name not in self._prioritized:
            return Selection(table, tracker, begin, end)
        budget = self._priority.budget(end - begin)
        if self._saves_all(end - begin):
            if not table.updates_only_looked_up_rows():
                return Selection(table, tracker, begin, end)
            return Selection(table, tracker, begin, end, tracker.dirty_rows(begin, end))
        row_ids = tracker.select(
            begin,
            end,
            max(0, budget - len(must)),
            weight=table.weight,
            pool=self._pool,
            stop=None if len(must) else stop,
        )
        if row_ids is not None and len(must):
            row_ids = np.union1d(row_ids, must)
        return None if row_ids is None else Selection(table, tracker, begin, end, row_ids)

    def are_complete(self, selections: Iterable[Selection], *, is_captured: bool) -> bool:
        """Return whether every row of the ranges is saved in its present state once captured.

        Args:
            is_captured: all rows of the selections are captured, so that no tracker has them.
        """
        partial: list[Selection] = []
        for selection in selections:
            table = selection.table
            if not self._has_kept_still(table):
                return False
            if selection.row_ids is not None:
                if not (table.updates_only_looked_up_rows() and self._is_proven(table)):
                    return False
                partial.append(selection)
        if not is_captured:
            return all(map(_has_all_dirty_rows, sorted(partial, key=self._by_doubt)))
        return native.are_clean(
            [native_trackers(each.tracker)[0] for each in partial],
            [each.begin for each in partial],
            [each.end for each in partial],
        )

    def _by_doubt(self, selection: Selection) -> tuple[bool, int]:
        """Sort tables first of which more rows may be dirty than were chosen.

        Their budget was used up, or they are large: rows have changed since they were chosen.
        """
        size = selection.end - selection.begin
        return selection.num_rows < self._priority.budget(size), -size

    def _range(self, table: Table, shard: int) -> tuple[int, int]:
        return shard_row_range(table.num_embeddings, shard, self._num_shards)


def _has_all_dirty_rows(selection: Selection) -> bool:
    """Return whether all dirty rows of the range are selected; stops early where they are not.

    It begins at the end: ids that are new, or seldom looked up, often have the highest numbers.
    """
    assert selection.row_ids is not None
    edges = np.append(np.arange(selection.begin, selection.end, _BLOCK_ROWS), selection.end)
    selected = np.diff(np.searchsorted(selection.row_ids, edges))
    blocks = zip(edges[:-1].tolist(), edges[1:].tolist(), selected.tolist(), strict=True)
    return all(
        selection.tracker.num_dirty(begin, end) == count
        for begin, end, count in reversed(list(blocks))
    )
