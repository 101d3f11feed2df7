"""Changes of tables outside of their optimizers' steps: which rows may differ unseen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from cpr_ext._native import native
from cpr_ext.errors import UntrackedChangeWarning
from cpr_ext.state.table import Table, is_row_state, may_move_rows, moving_tables
from cpr_ext.tracking.gradient_rows import GradientRows
from cpr_ext.tracking.table_events import TableEvents

_CHANGED_OUTSIDE = (
    "table '{name}' was changed outside its optimizer's step() ({what}). All of its rows count as "
    "changed until they are saved, and no snapshot without them is a full-recovery point. Change "
    "rows by the optimizer, or inside of writing_rows(), or call save('base') after such a change. "
    "This is reported once for each table"
)
_NOT_COUNTED = (
    "the rows that a step changed could not be counted: {error}. Later snapshots would lack them. "
    "Make a new Checkpointer"
)

_SETTLED_ROWS = 1 << 20  # at a time, so that their ids take little memory


_DIFFERENCES = {
    1: "its weight was written in place",
    2: "its weight has other memory",
    3: "its optimizer's state was replaced",
    4: "its optimizer's state was written in place",
}


RowSpans = Sequence[tuple[int, int]]  # of rows [begin, end), ascending


def complement(ranges: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return the ranges of the rows [0, end) that none of these holds.

    Args:
        ranges: ascending.
    """
    kept, at = [], 0
    for first, last in ranges:
        if at < first:
            kept.append((at, first))
        at = max(at, last)
    return [*kept, (at, end)] if at < end else kept


def overlap(left: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]) -> bool:
    """Return whether a row [begin, end) of one list of ranges is in one of the other."""
    return any(a < d and c < b for a, b in left for c, d in right)


class TableVersions:
    """Compares the weights of tables and their optimizers' state with how they last were.

    A write through ``.data``, or by a kernel that PyTorch does not know, moves no counter.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = list(tables)
        self._versions = native.TensorVersions(len(tables), is_row_state)
        self.read()

    def read(self) -> None:
        """Take all tables as they are now, whatever tensors they consist of."""
        self._versions.read(self._tables, range(len(self._tables)))

    def accept_tables(self, indexes: Collection[int]) -> None:
        """Take some tables as they are now, whatever tensors they consist of."""
        if indexes:
            self._versions.read(self._tables, list(indexes))

    def accept_assigned(self, index: int) -> None:
        """Take a table as it is now; a tensor of its state that was replaced is found later."""
        self._versions.accept(self._tables, [index])

    def are_same(self) -> bool:
        """Return whether nothing seems to have changed.

        Other memory of a weight is seen by :meth:`differences` only.
        """
        return self._versions.are_same(self._tables)

    def differences(self, indexes: Collection[int] | None = None) -> dict[int, str]:
        """Return changes since last accepted, for messages, by the table's position.

        Args:
            indexes: the positions of the tables to compare; None: all.
        """
        which = range(len(self._tables)) if indexes is None else list(indexes)
        found = self._versions.differences(self._tables, which)
        return {index: _DIFFERENCES[difference] for index, difference in found}

    def has_other_state(self, index: int) -> bool:
        """Return whether a table's optimizer state consists of other tensors than last accepted."""
        return self._versions.has_other_state(self._tables, index)


class OutsideChanges:
    """Notes tables of which more may have changed than the trackers counted.

    Args:
        by_weight: position of a table by ``id()`` of its weight.
        rows: counts what changed outside.

    Attributes:
        versions: finds such tables.
        foreign_step: what is wrong, if an optimizer that nobody gave updates tables.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        by_weight: Mapping[int, int],
        rows: GradientRows,
        events: TableEvents,
    ) -> None:
        self.versions = TableVersions(tables)
        self._events = events
        self.foreign_step: str | None = None
        self._tables = tables
        self._by_weight = by_weight
        self._rows = rows
        self._changed: dict[int, list[tuple[int, int]]] = {}  # ranges of rows, by table
        # Those that were made dirty as a whole since all was saved: some may not have changed.
        self._overcounted: dict[int, list[tuple[int, int]]] = {}
        self._moved: set[int] = set()  # tables whose optimizer moved rows without a gradient
        self._reported: set[tuple[str, int]] = set()

    @property
    def problem(self) -> str | None:
        """What makes further snapshots untrue, for a UsageError; None: nothing."""
        if self.foreign_step is not None:
            return self.foreign_step
        error = self._rows.error
        return None if error is None else _NOT_COUNTED.format(error=error)

    def is_changed(self, table: Table) -> bool:
        """Return whether more rows have changed than any tracker calls dirty, as far as is seen."""
        return self._by_weight[id(table.weight)] in self._changed or self.problem is not None

    @property
    def any_changed(self) -> bool:
        """Whether :meth:`is_changed` holds of any table."""
        return bool(self._changed) or self.problem is not None

    def moved(self) -> list[Table]:
        """Return tables of which clean rows may differ from what was saved, as far as is seen."""
        if self.problem is not None:
            return list(self._tables)
        return [self._tables[index] for index in sorted(self._changed.keys() | self._moved)]

    def are_counted(self) -> bool:
        """Return whether the rows that trackers call dirty are all that have changed.

        That is as far as hooks can know: writes past PyTorch are found by comparison.
        """
        if self.any_changed or self._moved or self._rows.unlisted:
            return False
        return not moving_tables(self._tables)

    def look(self, indexes: Collection[int] | None = None) -> None:
        """Look for changes in these tables; None: in all, and for replaced tensors, too."""
        if indexes is not None and self.versions.are_same():
            return
        self.note(self.versions.differences(indexes))

    def note(self, differences: Mapping[int, str], message: str = _CHANGED_OUTSIDE) -> None:
        """Note that tables changed; a difference says what did, by position."""
        if differences:
            self.versions.accept_tables(differences)
        for index, what in differences.items():
            table = self._tables[index]
            self._changed[index] = [(0, table.num_embeddings)]
            self._events.changed_outside(table)
            for listener in self._events.listeners:
                listener.changed_outside(table)
            if (message, index) not in self._reported:
                self._reported.add((message, index))
                text = message.format(name=table.name, what=what)
                warnings.warn(text, UntrackedChangeWarning, stacklevel=5)

    def accept_loss(
        self,
        lost: Callable[[Table], RowSpans],
        are_unchanged: Callable[[Table, RowSpans], bool] = lambda table, ranges: False,
    ) -> None:
        """Take note of changes without a report: rows about to be restored may change freely.

        Args:
            lost: the ranges [begin, end) of a table that are restored, ascending.
            are_unchanged: whether rows that count as clean were found to be as saved.
        """
        for index in self.versions.differences():
            table = self._tables[index]
            kept = complement(lost(table), table.num_embeddings)
            if kept and not are_unchanged(table, kept):
                self._changed.setdefault(index, []).extend(kept)
            if self.versions.has_other_state(index):  # by the loop, perhaps long ago
                self._overcounted.setdefault(index, []).extend(lost(table))
        self.versions.read()

    def counts_are_exact(self, table: Table, begin: int, end: int) -> bool:
        """Return whether of the rows [begin, end) just those that have changed are dirty."""
        index = self._by_weight[id(table.weight)]
        if self.is_changed(table) or index in self._moved or index in self._rows.unlisted:
            return False
        return not overlap(self._overcounted.get(index, []), [(begin, end)])

    def note_moved(self, table: Table) -> None:
        """Note that another optimizer has a table now: its rows have other state."""
        index = self._by_weight[id(table.weight)]
        self.versions.accept_tables([index])
        self._changed[index] = [(0, table.num_embeddings)]

    def record_hidden(self, table: Table, what: str) -> None:
        """Something has changed rows of a table, and no version counter moved."""
        self.note({self._by_weight[id(table.weight)]: what})

    def note_step(self, optimizer: torch.optim.Optimizer, owned: Sequence[int]) -> None:
        """Note a step of an optimizer that has the tables of these positions."""
        if not self._moved.issuperset(owned) and may_move_rows(optimizer):
            self._moved.update(
                index for index in owned if not self._tables[index].updates_only_looked_up_rows()
            )

    def note_all_saved(self) -> None:
        """Note that all rows that were dirty at the last :meth:`settle` are saved."""
        self._overcounted.clear()

    def settle(self) -> bool:
        """Make the rows of tables that changed outside dirty, in their trackers.

        So are those of tables whose optimizer used to move rows without a gradient: its settings
        changed, or the table was frozen. Returns whether there are such tables.
        """
        settled = {i for i in self._moved if self._tables[i].updates_only_looked_up_rows()}
        self._moved -= settled
        for index in settled:
            self._changed[index] = [(0, self._tables[index].num_embeddings)]
        for index, ranges in self._changed.items():
            self._overcounted.setdefault(index, []).extend(ranges)
            device = self._tables[index].weight.device
            for begin, end in ranges:
                for first in range(begin, end, _SETTLED_ROWS):
                    rows = torch.arange(first, min(end, first + _SETTLED_ROWS), device=device)
                    self._rows.count_rows([index], [rows])
        any_changed = bool(self._changed)
        self._changed.clear()
        return any_changed

    def forget(self) -> None:
        """Accept the tables as saved: nothing has changed since."""
        self._changed.clear()
        self._overcounted.clear()
        self._moved.clear()
        self.versions.read()
