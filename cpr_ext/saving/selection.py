"""Which rows go into a snapshot: all of a shard (base), or the most important ones (partial)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from cpr_ext._native import native
from cpr_ext.runtime.cuda import record_on_stream
from cpr_ext.saving.priorities import AllRows, Priority
from cpr_ext.state.table import Table, shard_row_range
from cpr_ext.tracking.key_watch import KeyWatch
from cpr_ext.tracking.trackers import Tracker, native_trackers

# So often choosing rows of a table is interrupted by training; then training waits for it.
_MOST_STOPS = 3
# Of a store of shards, a call looks at this part of all rows: training may wait for it.
_PARTS = 8

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
    tracker: Tracker
    row_ids: RowIds | None = None
    has_room: bool = True
    chosen: native.PendingRows | None = None

    @property
    def num_rows(self) -> int:
        """Rows selected."""
        return self.table.num_embeddings if self.row_ids is None else len(self.row_ids)

    def num_dirty(self) -> int:
        """Count the rows that are dirty; of chosen ones all are."""
        if self.row_ids is not None:
            return self.num_rows
        return int(self.tracker.num_dirty(0, self.table.num_embeddings))

    def has_all_dirty(self) -> bool:
        """Return whether no other row is dirty."""
        return self.num_rows == self.tracker.num_dirty(0, self.table.num_embeddings)

    def forget(self) -> None:
        """Free the row ids: all is saved."""
        self.row_ids, self.chosen = np.empty(0, np.int64), None


class ShardIds(NamedTuple):
    """The rows to save of one shard of a table: ascending ids (n,); None: all.

    Attributes:
        has_room: more rows might have been chosen.
    """

    row_ids: RowIds | None
    has_room: bool


class Selector:
    """Applies a priority to the tables of a model.

    Args:
        trackers: the tracker of each table, by table name.
        prioritized: names of the tables to which the priority applies; the others are saved whole.
        is_changed: whether a table was changed outside, and its rows do not count as dirty yet.
        num_shards: into how many row ranges each table is cut.
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
        self.tables = tables
        self._trackers = trackers
        self._priority = priority
        self._prioritized = prioritized
        self.num_shards = num_shards
        self._pool = pool

    @property
    def any_changed(self) -> bool:
        """Whether more rows have changed than trackers call dirty, as far as is seen."""
        return any(map(self._is_changed, self.tables))

    def num_dirty(self) -> int:
        """Count the dirty rows of all tables."""
        return sum(native.num_dirty_of([native_trackers(t)[0] for t in self._trackers.values()]))

    def num_rows(self, table: int) -> int:
        """Return the rows of the table of this number."""
        return self.tables[table].num_embeddings

    def base(self, table: int) -> Selection:
        """Return all rows of the table of this number."""
        chosen = self.tables[table]
        self._keys.must_save(chosen, 0, chosen.num_embeddings)  # raises for wrong keys
        return Selection(chosen, self._trackers[chosen.name])

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
        table: int,
        shards: range,
        stop: native.StopFlag | None = None,
        *,
        dirty_but: Collection[str] | None = None,
    ) -> list[ShardIds]:
        """Choose the rows of shards to save first, at most the fraction if a priority applies.

        Args:
            stop: a native ``StopFlag``. Once it is set, returns those of fewer shards.
            dirty_but: all dirty rows, and all rows of these tables; None: by priority.
        """
        chosen, edges = self.tables[table], self._edges(table, shards)
        tracker = self._trackers[chosen.name]
        ranges = list(pairwise(edges))
        must = [self._keys.must_save(chosen, *each) for each in ranges if chosen.slots is not None]
        is_prioritized = dirty_but is not None or chosen.name in self._prioritized
        saves_all = dirty_but is not None or self._saves_all
        is_moved = not chosen.updates_only_looked_up_rows() or chosen.name in (dirty_but or ())
        if not is_prioritized or (saves_all and is_moved):
            return [ShardIds(None, True)] * len(ranges)
        if saves_all:
            row_ids = [tracker.dirty_rows(*each) for each in ranges]
            ks = [end - begin + 1 for begin, end in ranges]
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
        return [ShardIds(ids, len(ids) < k) for ids, k in zip(row_ids, ks, strict=False)]

    def join(
        self, table: int, parts: Sequence[ShardIds], chosen: native.PendingRows | None
    ) -> Selection:
        """Return what was chosen of all shards of the table of this number.

        Args:
            chosen: what a GPU has chosen of the only shard.
        """
        of, has_room = self.tables[table], all(part.has_room for part in parts)
        ids = [part.row_ids for part in parts if part.row_ids is not None]
        joined = None  # all rows, if all rows of a shard are to be saved
        if len(ids) == len(parts):
            joined = ids[0] if len(ids) == 1 else np.concatenate(ids)
        return Selection(of, self._trackers[of.name], joined, has_room, chosen)

    def begin_partial(self, table: int, shard: int) -> native.PendingRows | None:
        """Let a GPU choose the rows during training, for :meth:`end_partial`.

        Returns:
            None where there is nothing to wait for.
        """
        chosen = self.tables[table]
        if chosen.name not in self._prioritized or self._saves_all:
            return None
        if chosen.slots is not None:
            return None  # some rows are chosen by their keys
        begin, end = self._edges(table, range(shard, shard + 1))
        tracker = self._trackers[chosen.name]
        budget = self._priority.budget(end - begin)
        return tracker.begin_select(begin, end, budget, weight=chosen.weight)

    def end_partial(self, table: int, shard: int, pending: native.PendingRows) -> ShardIds:
        """Return the rows that a GPU has chosen; waits until it has."""
        begin, end = self._edges(table, range(shard, shard + 1))
        row_ids = pending.read()
        return ShardIds(row_ids, len(row_ids) < self._priority.budget(end - begin))

    @property
    def _saves_all(self) -> bool:
        return isinstance(self._priority, AllRows) and self._priority.fraction == 1

    def are_complete(self, selections: Sequence[Selection], *, is_captured: bool) -> bool:
        """Return whether no row is dirty once all are captured.

        Args:
            selections: of all tables.
            is_captured: all rows of the selections are captured, so that no tracker has them.
        """
        partial = [each for each in selections if each.row_ids is not None]
        if any(self._is_changed(each.table) for each in selections):
            return False
        if not all(each.table.updates_only_looked_up_rows() for each in partial):
            return False
        if not is_captured:
            return all(each.has_all_dirty() for each in partial)
        # Rows of whole tables may have changed since they were captured, in the same step.
        return native.are_clean(
            [native_trackers(each.tracker)[0] for each in selections],
            [0] * len(selections),
            [each.table.num_embeddings for each in selections],
        )

    def _edges(self, table: int, shards: range) -> list[int]:
        """Return where the rows of shards begin; at last where they end."""
        num_rows = self.tables[table].num_embeddings
        edges = [shard_row_range(num_rows, shard, self.num_shards)[0] for shard in shards]
        return [*edges, shard_row_range(num_rows, shards[-1], self.num_shards)[1]]


class RowChoice:
    """Chooses the rows of a snapshot step by step; on any thread, one at a time.

    Attributes:
        selections: of the tables of which all is chosen.
    """

    def __init__(self, selector: Selector, kind: SnapshotKind) -> None:
        self.selections: list[Selection] = []
        self._selector = selector
        self._kind = kind
        self._all_rows = sum(map(selector.num_rows, range(len(selector.tables))))
        self._of_table: list[ShardIds] = []  # of the next table, shard by shard
        self._pending: dict[tuple[int, int], native.PendingRows] = {}
        self._num_stopped = 0  # of the next shards
        self._dirty_but: Collection[str] | None = None

    @property
    def is_done(self) -> bool:
        """Whether all rows are chosen."""
        return len(self.selections) == len(self._selector.tables)

    @property
    def is_pending(self) -> bool:
        """Whether a GPU has not chosen the next rows yet."""
        pending = self._pending.get((len(self.selections), len(self._of_table)))
        return pending is not None and not pending.is_ready()

    def begin(self) -> None:
        """Let GPUs choose rows as they are now; :meth:`choose` reads which they are."""
        if self._kind == "base":
            return
        self._selector.record_weights()
        for table in range(len(self._selector.tables)):
            for shard in range(self._selector.num_shards):
                pending = self._selector.begin_partial(table, shard)
                if pending is not None:
                    self._pending[table, shard] = pending

    def choose(
        self,
        stop: native.StopFlag | None = None,
        *,
        some: bool = False,
        wait: bool = True,
        dirty_but: Collection[str] | None = None,
    ) -> None:
        """Choose rows of the next tables.

        Args:
            stop: a native ``StopFlag``. Once it is set, the next rows are left for another call;
                but not more often than a few times.
            some: look at about an eighth of all rows, unless there is one shard; else at all.
            wait: wait for a GPU that chooses, instead of returning.
            dirty_but: all dirty rows, and all rows of these tables; None: by priority.
        """
        self._dirty_but = dirty_but
        left = sys.maxsize
        if some and self._kind != "base":  # of which no row is looked at
            parts = min(_PARTS, self._selector.num_shards)
            left = -(-self._all_rows // parts) if parts > 1 else left
        while left > 0 and not self.is_done and (wait or not self.is_pending):
            left -= self._choose_of_table(left, stop)
            if stop is not None and stop.is_set():
                return

    def _choose_of_table(self, most_rows: int, stop: native.StopFlag | None) -> int:
        """Choose rows of the next table; return at how many it has looked."""
        selector, table, shard = self._selector, len(self.selections), len(self._of_table)
        num_shards, num_rows = selector.num_shards, selector.num_rows(table)
        if self._kind == "base":
            self.selections.append(selector.base(table))
            return num_rows
        pending = self._pending.pop((table, shard), None)
        if pending is not None:
            found = [selector.end_partial(table, shard, pending)]
        else:
            end = min(num_shards, shard + max(1, most_rows * num_shards // num_rows))
            stop = None if self._num_stopped >= _MOST_STOPS else stop
            found = selector.partial(table, range(shard, end), stop, dirty_but=self._dirty_but)
        self._num_stopped = 0 if found else self._num_stopped + 1
        self._of_table += found
        if len(self._of_table) == num_shards:
            # Of several shards a GPU has the row ids in pieces.
            chosen = pending if num_shards == 1 else None
            self.selections.append(selector.join(table, self._of_table, chosen))
            self._of_table = []
        return num_rows * len(found) // num_shards
