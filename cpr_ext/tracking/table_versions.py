"""Whether tables were written in place, as PyTorch's version counters have it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cpr_ext._native import native
from cpr_ext.state.table import Table, is_row_state

_DIFFERENCES = {
    1: "its weight was written in place",
    2: "its weight has other memory",
    3: "its optimizer's state was replaced",
    4: "its optimizer's state was written in place",
}


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
