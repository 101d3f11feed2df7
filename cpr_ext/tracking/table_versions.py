"""Whether tables were written in place, as PyTorch's version counters have it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.state.table import Table, is_row_state

# Steps in which every optimizer has shown whether it replaces the tensors of its state.
_TRIAL_STEPS = 4


class TableVersions:
    """Compares the weights of tables and their optimizers' state with how they last were.

    A write through ``.data``, or by a kernel that PyTorch does not know, moves no counter.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._trial_steps = _TRIAL_STEPS
        self._are_replaced = False  # an optimizer makes new tensors for its state in its steps
        self.read()

    def read(self) -> None:
        """Take all tables as they are now, whatever tensors they consist of."""
        self._tensors: list[list[torch.Tensor]] = [[] for _ in self._tables]
        self._pointers = [0] * len(self._tables)
        self._versions = native.TensorVersions(len(self._tables))
        self._states: list[tuple[Any, Any, int]] = []
        self.accept_tables(range(len(self._tables)))

    def accept_tables(self, indexes: Collection[int]) -> None:
        """Take some tables as they are now, whatever tensors they consist of."""
        if not indexes:
            return
        for index in indexes:
            table = self._tables[index]
            tensors = [table.weight, *_state_tensors(table)]
            self._versions.set(index, tensors, _state_of(table))
            self._tensors[index] = tensors
            self._pointers[index] = table.weight.data_ptr()
        optimizers = {id(t.optimizer): t.optimizer for t in self._tables if t.optimizer is not None}
        self._states = [
            (optimizer, optimizer.state, len(optimizer.state)) for optimizer in optimizers.values()
        ]

    def accept_step(self, written: Collection[int]) -> None:
        """Take the tables that an optimizer's step has written as they are now.

        Args:
            written: those tables. Any other that differs was written by something else.
        """
        can_be_read = not self._is_exact and not self._has_other_states()
        if can_be_read and self._versions.accept(list(written)):
            return
        before = [self._tensors[index] for index in written]
        self.accept_tables(written)
        if self._trial_steps > 0 and written:
            after = [self._tensors[index] for index in written]
            if [len(tensors) for tensors in before] == [len(tensors) for tensors in after]:
                self._trial_steps -= 1
                self._are_replaced |= any(map(_are_others, before, after))

    def accept_assigned(self, index: int) -> None:
        """Take a table as it is now; a tensor of its state that was replaced is found later."""
        if self._has_other_states() or not self._versions.accept([index]):
            self.accept_tables([index])

    def are_same(self) -> bool:
        """Return whether nothing seems to have changed.

        A tensor of state that was replaced by another is seen by :meth:`differences` only, unless
        optimizers do so themselves.
        """
        if self._is_exact:
            return not self.differences()
        return not self._has_other_states() and bool(self._versions.are_same())

    def differences(self, indexes: Collection[int] | None = None) -> dict[int, str]:
        """Return changes since last accepted, for messages, by the table's position.

        Args:
            indexes: the positions of the tables to compare; None: all.
        """
        found: dict[int, str] = {}
        for index in range(len(self._tables)) if indexes is None else indexes:
            table = self._tables[index]
            then, versions = self._tensors[index], self._versions.values(index)
            now = [table.weight, *_state_tensors(table)]
            if table.weight._version != versions[0]:
                found[index] = "its weight was written in place"
            elif table.weight.data_ptr() != self._pointers[index]:
                found[index] = "its weight has other memory"
            elif _are_others(now, then):
                found[index] = "its optimizer's state was replaced"
            elif [tensor._version for tensor in now] != versions:
                found[index] = "its optimizer's state was written in place"
        return found

    def has_other_state(self, index: int) -> bool:
        """Return whether a table's optimizer state consists of other tensors than last accepted."""
        table = self._tables[index]
        return _are_others(_state_tensors(table), self._tensors[index][1:])

    @property
    def _is_exact(self) -> bool:
        return self._trial_steps > 0 or self._are_replaced

    def _has_other_states(self) -> bool:
        return any(
            optimizer.state is not state or len(state) != size
            for optimizer, state, size in self._states
        )


def _are_others(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) != len(right) or any(a is not b for a, b in zip(left, right, strict=True))


def _state_of(table: Table) -> Any:
    return None if table.optimizer is None else table.optimizer.state.get(table.weight)


def _state_tensors(table: Table) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state that have a value for each row."""
    state, num_rows = _state_of(table), table.num_embeddings
    return [value for value in state.values() if is_row_state(value, num_rows)] if state else []
