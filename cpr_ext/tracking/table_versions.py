"""Whether tables were written in place, as PyTorch's version counters have it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.state.table import Table

# Steps in which every optimizer has shown whether it replaces the tensors of its state.
_TRIAL_STEPS = 4


class TableVersions:
    """Compares the weights of tables and their optimizers' state with how they last were.

    A write through ``.data``, or by a kernel that PyTorch does not know, moves no counter.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._trial_steps = _TRIAL_STEPS
        self._may_count = True  # see accept_step
        self._are_replaced = False  # an optimizer makes new tensors for its state in its steps
        self.read()

    def read(self) -> None:
        """Take the tables as they are now, whatever tensors they consist of."""
        self._tensors: list[torch.Tensor] = []
        self._versions = native.TensorVersions([], [], [])
        self._spans = [(0, 0)] * len(self._tables)
        self._pointers = [0] * len(self._tables)
        self.accept_tables(range(len(self._tables)))

    def accept_tables(self, indexes: Collection[int]) -> None:
        """Take some tables as they are now, whatever tensors they consist of."""
        tensors: list[torch.Tensor] = []
        versions: list[int] = []
        of_tables: list[int] = []
        known = self._versions.values()
        for index, table in enumerate(self._tables):
            begin, end = self._spans[index]
            now, then = self._tensors[begin:end], known[begin:end]
            if index in indexes:
                now = [table.weight, *_state_tensors(table)]
                then = [tensor._version for tensor in now]
                self._pointers[index] = table.weight.data_ptr()
            self._spans[index] = (len(tensors), len(tensors) + len(now))
            tensors += now
            versions += then
            of_tables += [index] * len(now)
        self._tensors = tensors
        self._versions = native.TensorVersions(tensors, of_tables, versions)
        self._note_sizes()

    def _note_sizes(self) -> None:
        optimizers = {id(t.optimizer): t.optimizer for t in self._tables if t.optimizer is not None}
        self._states: list[tuple[Any, Any, int]] = [
            (optimizer, optimizer.state, len(optimizer.state)) for optimizer in optimizers.values()
        ]
        self._of_weights: list[Any] = [
            state for table in self._tables if (state := _state_of(table)) is not None
        ]
        self._sizes = [len(state) for state in self._of_weights]

    def accept(self) -> None:
        """Take the tables as they are now, after a step of an optimizer."""
        if self._is_exact or self._has_other_state():
            before = self._tensors
            self.read()
            if self._trial_steps > 0 and len(before) == len(self._tensors):
                self._trial_steps -= 1
                pairs = zip(before, self._tensors, strict=True)
                self._are_replaced = self._are_replaced or any(a is not b for a, b in pairs)
        else:
            self._versions.accept()

    def accept_step(self, owned: Collection[int], stepped: Sequence[int]) -> None:
        """Take the tables of an optimizer as they are after its step.

        Args:
            owned: the tables that it has.
            stepped: those of them that have gradients. Of a tensor that was written as often in
                each of some steps, the version is not read again but counted, which costs less.
        """
        if self._is_exact or self._has_other_state() or not self._may_count:
            self.accept()
            return
        self._versions.accept_step(stepped)
        if len(stepped) < len(owned):
            self.accept_tables(set(owned).difference(stepped))

    def read_always(self) -> None:
        """Tables change in other ways than before: count no more, see :meth:`accept_step`."""
        self._may_count = False
        self.accept_tables(())

    def seem_same(self) -> bool:
        """As :meth:`are_same`, of tensors whose versions are read after each step."""
        if self._is_exact:
            return not self.differences()
        return bool(self._versions.are_same(unsteady_only=True))

    def are_same(self) -> bool:
        """Whether nothing seems to have changed.

        A tensor of state that was replaced by another is seen by :meth:`differences` only, unless
        optimizers do so themselves.
        """
        if self._is_exact:
            return not self.differences()
        return self._versions.are_same() and not self._has_other_state()

    def differences(self) -> dict[int, str]:
        """What changed since last accepted, for messages, by the table's position."""
        found: dict[int, str] = {}
        versions = self._versions.values()
        for index, table in enumerate(self._tables):
            first, last = self._spans[index]
            now = [table.weight, *_state_tensors(table)]
            then = self._tensors[first:last]
            if table.weight._version != versions[first]:
                found[index] = "its weight was written in place"
            elif table.weight.data_ptr() != self._pointers[index]:
                found[index] = "its weight has other memory"
            elif len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
                found[index] = "its optimizer's state was replaced"
            elif [tensor._version for tensor in now] != versions[first:last]:
                found[index] = "its optimizer's state was written in place"
        return found

    @property
    def _is_exact(self) -> bool:
        return self._trial_steps > 0 or self._are_replaced

    def _has_other_state(self) -> bool:
        for optimizer, state, size in self._states:
            if optimizer.state is not state or len(state) != size:
                return True
        return [len(state) for state in self._of_weights] != self._sizes


def _state_of(table: Table) -> Any:
    return None if table.optimizer is None else table.optimizer.state.get(table.weight)


def _state_tensors(table: Table) -> list[torch.Tensor]:
    state = _state_of(table)
    return [value for value in state.values() if isinstance(value, torch.Tensor)] if state else []
