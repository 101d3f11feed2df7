"""Training steps that no hook sees: a replayed CUDA graph changes tables and runs no Python.

A graph that is captured while the Checkpointer watches holds the counting of its rows, too. What
another graph changes cannot be known, only that no step was seen.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from cpr_ext.state.table import Table

_NO_STEP = "no step of its optimizer was seen since the last step(), and a replayed graph has none"
_NO_LOOKUP = "no lookup was seen since the last step(), and a replayed graph reports none"
_NOT_LISTED = "a CUDA graph changes it by dense gradients, of which a graph cannot list the rows"


def can_be_replayed(table: Table) -> bool:
    """Return whether a CUDA graph may change the table."""
    return table.weight.is_cuda


class UnseenSteps:
    """Knows of which tables the last training step was not seen.

    Attributes:
        captured: positions of the tables that a captured graph changes.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.captured: set[int] = set()
        self._uncounted: set[int] = set()  # of those whose graph counts no rows
        self._seen: set[int] = set()
        self._expected: dict[int, str] = {}
        for index, table in enumerate(tables):
            if not can_be_replayed(table):
                continue
            if table.lookups is not None:
                self._expected[index] = _NO_LOOKUP
            elif isinstance(table.optimizer, torch.optim.Optimizer):
                self._expected[index] = _NO_STEP

    @property
    def is_possible(self) -> bool:
        """Whether a graph may change a table of which steps are to be seen."""
        return bool(self._expected)

    def note_seen(self, indexes: Collection[int]) -> None:
        """Note that rows of these tables were counted, or that they have not changed."""
        if self._expected:
            self._seen.update(indexes)

    def note_captured(self, index: int, *, is_counted: bool) -> None:
        """Note that a graph was captured that changes a table.

        Args:
            is_counted: each replay counts the rows that it changes.
        """
        self.captured.add(index)
        if not is_counted:
            self._uncounted.add(index)

    def end_step(self) -> dict[int, str]:
        """Return the tables that may have changed uncounted in the last step, and why."""
        if not self._expected and not self._uncounted:
            return {}
        seen, self._seen = self._seen | self.captured, set()
        unseen = {index: why for index, why in self._expected.items() if index not in seen}
        return {**unseen, **dict.fromkeys(self._uncounted, _NOT_LISTED)}
