"""The rows of one snapshot, chosen table by table."""

from __future__ import annotations

import sys
from collections.abc import Collection

from cpr_ext._native import native
from cpr_ext.saving.selection import Selection, Selector, ShardIds, SnapshotKind

# So often choosing rows of a table is interrupted by training; then training waits for it.
_MOST_STOPS = 3
# Of a store of shards, a call looks at this part of all rows: training may wait for it.
_PARTS = 8


class RowChoice:
    """Chooses the rows of a snapshot step by step; on any thread, one at a time.

    Attributes:
        selections: of the tables of which all is chosen.
    """

    def __init__(self, selector: Selector, kind: SnapshotKind) -> None:
        self.selections: list[Selection] = []
        self._selector = selector
        self._kind = kind
        self._all_rows = sum(map(selector.num_rows, range(selector.num_tables)))
        self._of_table: list[ShardIds] = []  # of the next table, shard by shard
        self._pending: dict[tuple[int, int], native.PendingRows] = {}
        self._num_stopped = 0  # of the next shards
        self._dirty_but: Collection[str] | None = None

    @property
    def is_done(self) -> bool:
        """Whether all rows are chosen."""
        return len(self.selections) == self._selector.num_tables

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
        for table in range(self._selector.num_tables):
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
