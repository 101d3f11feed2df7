"""Rows of a rebuilt worker that are not there yet, and the lookups that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from cpr_ext.distributed.collective import torch_private
from cpr_ext.state.table import Table

# Functions whose first argument, or ``input``, is the row ids that they read.
_LOOKUPS = (nn.Embedding.forward, nn.EmbeddingBag.forward)
_ROWS_AT_ONCE = 1 << 16

Fetch = Callable[[int, torch.Tensor], None]


class MissingRows:
    """Lets lookups of rows wait until these are there.

    Rows come one by one, because a lookup needs them, and in ascending order of the shard's words.

    Args:
        layout: of the shard, ``ShardLayout``.
        tables: in the order of the layout, which has others after them.

    Attributes:
        fetch: called with the position of a table and the ids (n,) of missing rows that are looked
            up now; returns once they are there.
        below: all words of the shard below this one are there.
        note_bypassed: called when missing rows are about to change: something has read them that
            does not wait.
    """

    def __init__(self, layout: Any, tables: Sequence[Table], fetch: Fetch) -> None:
        self.fetch = fetch
        self.below: int = layout.num_words
        self.note_bypassed: Callable[[], None] = lambda: None
        self._num_words: int = layout.num_words
        self._tables = tables
        self._records: list[tuple[int, int]] = layout.records
        self._first_words = _first_words(self._records)
        self._is_there: list[torch.Tensor] = []  # by table and row: it came by itself
        self._handles: list[Any] = []

    def watch_lookups(self) -> None:
        """Have lookups wait from now on; before a model is compiled."""
        sources: dict[int, Any] = {}
        for number, table in enumerate(self._tables):
            if table.lookups is not None:
                sources[id(table.lookups)] = table.lookups
            elif self.is_served(number):
                for module in table.modules:
                    self._handles.append(self._watch(module, table))
        for source in sources.values():
            self._handles += source.watch_lookups(self.need)

    def is_served(self, number: int) -> bool:
        """Return whether lookups of this table can wait; otherwise its rows must be there."""
        if number >= len(self._tables):
            return False  # keys, by which lookups are made
        table = self._tables[number]
        if not table.updates_only_looked_up_rows():
            return False
        if table.lookups is not None:
            return True
        modules = table.modules
        return bool(modules) and all(type(module).forward in _LOOKUPS for module in modules)

    def begin(self) -> None:
        """Make every row missing."""
        self.below = 0
        # NumPy's zeros are pages that nothing has touched, so this takes as long for any table.
        self._is_there = [torch.from_numpy(np.zeros(rows, dtype=bool)) for rows, _ in self._records]

    def end(self) -> None:
        """Make every row present."""
        self.below = self._num_words
        self._is_there = []

    @property
    def is_any(self) -> bool:
        """Whether a row is missing."""
        return bool(self._is_there)

    def find(self, number: int, row_ids: torch.Tensor) -> torch.Tensor:
        """Return those of ``row_ids``, of any shape, that are missing: (n,) ascending, int64."""
        if not (is_there := self._is_there):  # end() may be called meanwhile
            return torch.empty(0, dtype=torch.int64)
        row_ids = row_ids.reshape(-1).long()
        rows = self._records[number][0]
        # Ids past the table are the lookup's error.
        row_ids = row_ids[(row_ids >= self._complete_rows(number)) & (row_ids < rows)]
        missing = row_ids[~is_there[number][row_ids]]
        return torch.unique(missing) if missing.numel() else missing

    def places(self, number: int, row_ids: torch.Tensor) -> torch.Tensor:
        """Return the words of the shard at which rows (n,) begin."""
        return row_ids * self._records[number][1] + self._first_words[number]

    def width(self, number: int) -> int:
        """Return the words of one row."""
        return self._records[number][1]

    def span(self, number: int) -> tuple[int, int]:
        """Return the words of a table."""
        rows, width = self._records[number]
        first = self._first_words[number]
        return first, first + rows * width

    def note_rows(self, number: int, row_ids: torch.Tensor) -> None:
        """Note that these rows (n,) are there."""
        self._is_there[number][row_ids] = True

    def note_table(self, number: int) -> None:
        """Note that all rows of a table are there."""
        self._is_there[number][:] = True

    def own_words(self, begin: int, end: int) -> torch.Tensor:
        """Return which of the words [begin, end) belong to rows that came by themselves."""
        found = torch.zeros(end - begin, dtype=torch.bool)
        for number, (_, width) in enumerate(self._records):
            first, last = self.span(number)
            start, stop = max(begin, first), min(end, last)
            if start >= stop:
                continue
            rows = slice((start - first) // width, -(-(stop - first) // width))
            of_rows = self._is_there[number][rows].repeat_interleave(width)
            skipped = (start - first) - rows.start * width
            found[start - begin : stop - begin] = of_rows[skipped : skipped + stop - start]
        return found

    def need(self, table: Table, row_ids: torch.Tensor) -> None:
        """Return once these rows, of any shape, are there."""
        if not self.is_any:
            return
        number = next(n for n, known in enumerate(self._tables) if known is table)
        # Again, as another thread's request may take the place of this one.
        while (missing := self.find(number, row_ids)).numel():
            self.fetch(number, missing[:_ROWS_AT_ONCE])

    def _complete_rows(self, number: int) -> int:
        """Return how many first rows of a table are there because all words before are."""
        rows, width = self._records[number]
        complete = (self.below - self._first_words[number]) // width
        return min(rows, max(0, complete))

    def _watch(self, module: nn.Module, table: Table) -> Any:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            row_ids = args[0] if args else kwargs.get("input")
            if isinstance(row_ids, torch.Tensor):
                self.need(table, row_ids.values() if row_ids.is_nested else row_ids)

        outside = torch_private.outside_graphs(look)
        return module.register_forward_pre_hook(outside, with_kwargs=True)


def _first_words(records: Sequence[tuple[int, int]]) -> list[int]:
    firsts, at = [], 0
    for rows, width in records:
        firsts.append(at)
        at += rows * width
    return firsts
