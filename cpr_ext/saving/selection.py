"""Which rows go into a snapshot: all of a shard (base), or the most important ones (partial)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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


@dataclass(slots=True)
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

    def has_all_dirty(self) -> bool:
        """Return whether no other row of the range is dirty."""
        return self.num_rows == self.tracker.num_dirty(self.begin, self.end)

    def forget(self) -> None:
        """Free the row ids: all is saved."""
        self.row_ids = self.chosen = None
        self.end = self.begin


class Selector:
    """Applies a priority to the tables of a model.

    Args:
        trackers: the tracker of each table, by table name.
        prioritized: names of the tables to which the priority applies; the others are saved whole.
        is_changed: whether a table was changed outside, and its rows do not count as dirty yet.
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
        is_changed: Callable[[Table], bool],
        keys: KeyWatch,
    ) -> None:
        self._keys = keys
        self._is_changed = is_changed
        self._tables = tables
        self._trackers = trackers
        self._priority = priority
        self._prioritized = prioritized
        self._num_shards = num_shards
        self._pool = pool

    @property
    def tables(self) -> Sequence[Table]:
        """The tables to choose rows from."""
        return self._tables

    @property
    def any_changed(self) -> bool:
        """Whether more rows have changed than trackers call dirty, as far as is seen."""
        return any(map(self._is_changed, self._tables))

    def num_dirty(self) -> int:
        """Count the dirty rows of all tables."""
        return sum(native.num_dirty_of([native_trackers(t)[0] for t in self._trackers.values()]))

    @property
    def num_tables(self) -> int:
        """Tables to choose rows from."""
        return len(self._tables)

    @property
    def num_shards(self) -> int:
        """Into how many row ranges each table is cut."""
        return self._num_shards

    def num_rows(self, table: int) -> int:
        """Return the rows of the table of this number."""
        return self._tables[table].num_embeddings

    def base(self, table: int, shards: range) -> list[Selection]:
        """Return all rows that shards have of the table of this number."""
        chosen, edges = self._tables[table], self._edges(table, shards)
        self._keys.must_save(chosen, edges[0], edges[-1])  # raises for wrong keys
        tracker = self._trackers[chosen.name]
        return [Selection(chosen, tracker, begin, end) for begin, end in pairwise(edges)]

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
        shards: range,
        stop: native.StopFlag | None = None,
        *,
        dirty_but: Collection[str] | None = None,
    ) -> list[Selection]:
        """Choose the rows to save first, at most the fraction if the table is prioritised.

        Args:
            stop: a native ``StopFlag``. Once it is set, returns those of fewer shards.
            dirty_but: all dirty rows, and all rows of these tables; None: by priority.
        """
        chosen, edges = self._tables[table], self._edges(table, shards)
        tracker = self._trackers[chosen.name]
        ranges = list(pairwise(edges))
        must = [self._keys.must_save(chosen, *each) for each in ranges if chosen.slots is not None]
        is_prioritized = dirty_but is not None or chosen.name in self._prioritized
        saves_all = dirty_but is not None or self._saves_all
        is_moved = not chosen.updates_only_looked_up_rows() or chosen.name in (dirty_but or ())
        if not is_prioritized or (saves_all and is_moved):
            return [Selection(chosen, tracker, *each) for each in ranges]
        if saves_all:
            row_ids = [tracker.dirty_rows(*each) for each in ranges]
        else:
            ks = [self._priority.budget(end - begin) for begin, end in ranges]
            row_ids = tracker.select_ranges(
                edges,
                [max(0, k - len(first)) for k, first in zip(ks, must, strict=True)] if must else ks,
                weight=chosen.weight,
                pool=self._pool,
                stop=None if any(map(len, must)) else stop,
            )
        if must:
            row_ids = list(map(np.union1d, row_ids, must))
        return [
            Selection(chosen, tracker, begin, end, ids)
            for (begin, end), ids in zip(ranges, row_ids, strict=False)
        ]

    def begin_partial(self, table: int, shard: int) -> native.PendingRows | None:
        """Let a GPU choose the rows during training, for :meth:`end_partial`.

        Returns:
            None where there is nothing to wait for.
        """
        chosen = self._tables[table]
        if chosen.name not in self._prioritized or self._saves_all:
            return None
        if chosen.slots is not None:
            return None  # some rows are chosen by their keys
        begin, end = self._edges(table, range(shard, shard + 1))
        tracker = self._trackers[chosen.name]
        budget = self._priority.budget(end - begin)
        return tracker.begin_select(begin, end, budget, weight=chosen.weight)

    def end_partial(self, table: int, shard: int, pending: native.PendingRows) -> Selection:
        """Return the rows that a GPU has chosen; waits until it has."""
        chosen = self._tables[table]
        begin, end = self._edges(table, range(shard, shard + 1))
        tracker = self._trackers[chosen.name]
        return Selection(chosen, tracker, begin, end, pending.read(), pending)

    @property
    def _saves_all(self) -> bool:
        return isinstance(self._priority, AllRows) and self._priority.fraction == 1

    def are_complete(self, by_table: Iterable[Sequence[Selection]], *, is_captured: bool) -> bool:
        """Return whether no row of the ranges is dirty once all are captured.

        Args:
            by_table: the selections of all shards, of each table.
            is_captured: all rows of the selections are captured, so that no tracker has them.
        """
        by_table = list(by_table)
        partial: list[Sequence[Selection]] = []
        for of_table in by_table:
            table = of_table[0].table
            if self._is_changed(table):
                return False
            if any(each.row_ids is not None for each in of_table):
                if not table.updates_only_looked_up_rows():
                    return False
                partial.append(of_table)
        if not is_captured:
            return all(each.has_all_dirty() for of_table in partial for each in of_table)
        # Rows of whole tables may have changed since they were captured, in the same step.
        return native.are_clean(
            [native_trackers(of_table[0].tracker)[0] for of_table in by_table],
            [of_table[0].begin for of_table in by_table],
            [of_table[-1].end for of_table in by_table],
        )

    def have_room(self, by_table: Iterable[Sequence[Selection]]) -> bool:
        """Return whether no budget was used up: then all dirty rows were chosen."""
        return all(
            each.row_ids is None
            or self._saves_all
            or each.num_rows < self._priority.budget(each.end - each.begin)
            for of_table in by_table
            for each in of_table
        )

    def _edges(self, table: int, shards: range) -> list[int]:
        """Return where the rows of shards begin; at last where they end."""
        num_rows = self._tables[table].num_embeddings
        edges = [shard_row_range(num_rows, shard, self._num_shards)[0] for shard in shards]
        return [*edges, shard_row_range(num_rows, shards[-1], self._num_shards)[1]]
