"""The rows of one snapshot, chosen table by table, one shard after the other."""

from __future__ import annotations

from cpr_ext._native import native
from cpr_ext.saving.selection import Selection, Selector, SnapshotKind

# So often choosing rows of a table is interrupted by training; then training waits for it.
_MOST_STOPS = 3


class RowChoice:
    """Chooses the rows of a snapshot step by step; on any thread, one at a time.

    Attributes:
        selections: all that were chosen, of shards that are complete.
    """

    def __init__(self, selector: Selector, kind: SnapshotKind, num_shards: int) -> None:
        self.selections: list[Selection] = []
        self._selector = selector
        self._kind = kind
        self._num_shards = num_shards
        self._shard = 0
        self._of_shard: list[Selection] = []  # of the next shard, table by table
        self._pending: dict[tuple[int, int], native.PendingRows] = {}
        self._num_stopped = 0  # of the next table

    @property
    def is_done(self) -> bool:
        """Whether all rows are chosen."""
        return self._shard == self._num_shards

    @property
    def is_pending(self) -> bool:
        """Whether a GPU has not chosen the rows of the next table yet."""
        pending = self._pending.get((len(self._of_shard), self._shard))
        return pending is not None and not pending.is_ready()

    def begin(self) -> None:
        """Let GPUs choose rows as they are now; :meth:`choose_next` reads which they are."""
        if self._kind == "base":
            return
        self._selector.record_weights()
        for shard in range(self._num_shards):
            for table in range(self._selector.num_tables):
                pending = self._selector.begin_partial(table, shard)
                if pending is not None:
                    self._pending[table, shard] = pending

    def choose_next(
        self, stop: native.StopFlag | None = None
    ) -> tuple[int, list[Selection]] | None:
        """Choose the rows of the next table.

        Args:
            stop: a native ``StopFlag``. Once it is set, the table is left for another call; but not
                more often than a few times.

        Returns:
            The shard and its selections, after the last table of the shard; else None.
        """
        shard, selector, table = self._shard, self._selector, len(self._of_shard)
        if table < selector.num_tables:
            selection = self._select(table, shard, stop)
            if selection is None:
                self._num_stopped += 1
                return None
            self._num_stopped = 0
            self._of_shard.append(selection)
            if len(self._of_shard) < selector.num_tables:
                return None
        chosen, self._of_shard = self._of_shard, []
        self._shard += 1
        self.selections += chosen
        return shard, chosen

    def _select(self, table: int, shard: int, stop: native.StopFlag | None) -> Selection | None:
        if self._kind == "base":
            return self._selector.base(table, shard)
        pending = self._pending.pop((table, shard), None)
        stop = None if self._num_stopped >= _MOST_STOPS else stop
        return self._selector.partial(table, shard, pending, stop)
