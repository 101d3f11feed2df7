"""Who hears of what happens to tables: one object for those who see it and those who listen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ParamSpec, Protocol

import torch

from cpr_ext.state.table import Table

_Given = ParamSpec("_Given")


class ChangeListener(Protocol):
    """Hears of every change of tables, on the training thread."""

    def before_change(self, table: Table, row_ids: torch.Tensor) -> None:
        """Note that rows ``row_ids`` (n,) int64, perhaps repeated, are about to change."""

    def before_write(self, table: Table, row_ids: torch.Tensor) -> None:
        """Note that rows (n,) are about to be written past their optimizer, as is said first."""

    def changed_outside(self, table: Table) -> None:
        """Note that something else than its optimizer has changed a table, or may have."""


class TableEvent(list[Callable[_Given, object]]):
    """Those who hear of one kind of event; calling it calls them. Nobody costs nothing."""

    def __call__(self, *args: _Given.args, **options: _Given.kwargs) -> None:
        """Call all, in the order in which they joined."""
        for hear in self:
            hear(*args, **options)

    def leave(self, hear: Callable[_Given, object]) -> None:
        """Call this one no more."""
        with suppress(ValueError):
            self.remove(hear)


class TableEvents:
    """The listeners of one Checkpointer, which are called on the training thread.

    Attributes:
        before_use: before rows change, and before trackers are used; no other thread uses either
            once it returns.
        rows_change: with the rows that are about to change, to compare them with what was saved.
        changed_outside: a table that something else than its optimizer has changed.
        stranger_stepped: before an optimizer steps that was not given; it may be inside of one that
            was.
        may_begin: asked before a snapshot begins. With True, an answer is True, once one may.
        listeners: of all changes, whether or not a snapshot is being taken.
    """

    def __init__(self) -> None:
        self.before_use: TableEvent[[]] = TableEvent()
        self.rows_change: TableEvent[Sequence[Table], Sequence[torch.Tensor]] = TableEvent()
        self.changed_outside: TableEvent[Table] = TableEvent()
        self.stranger_stepped: TableEvent[torch.optim.Optimizer] = TableEvent()
        self.may_begin: list[Callable[[bool], bool]] = []
        self.listeners: list[ChangeListener] = []
