"""Samples of rows, to notice changes that PyTorch does not count: by ``.data``, by other libraries.

A sample cannot prove that nothing changed. It finds what touches large parts of a table, such as
weights swapped for an evaluation or normalised from outside, within a snapshot or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cpr_ext.cuda import device_of
from cpr_ext.errors import UsageError
from cpr_ext.saving.selection import Selection
from cpr_ext.state.table import Table

_ROWS_OF_A_CHUNK = 4
_ROWS_OF_A_TABLE = 32


@dataclass
class _Kept:
    """Recorded bytes of some rows of one array."""

    table: Table
    array: torch.Tensor
    row_ids: torch.Tensor
    rows: torch.Tensor


class WindowSample:
    """Some of the rows that were captured while training only read: they must still be the same."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def note(self, selection: Selection, first: int, count: int) -> None:
        """Record rows [first, first + count) of a selection, by position, as just captured."""
        spread = (first + count * i // _ROWS_OF_A_CHUNK for i in range(_ROWS_OF_A_CHUNK))
        positions = sorted({*spread, first + count - 1})
        if selection.row_ids is None:
            row_ids = torch.tensor([selection.begin + position for position in positions])
        else:
            row_ids = torch.from_numpy(selection.row_ids[positions])
        for array in selection.table.arrays().values():
            self._kept.append(_Kept(selection.table, array, row_ids, array[row_ids]))

    def forget(self) -> None:
        """Another window opens: rows may have changed as they like."""
        self._kept.clear()

    def changed_table(self) -> Table | None:
        """Return a table with a changed row, if any; drop the recorded rows."""
        kept, self._kept = self._kept, []
        by_array: dict[int, list[_Kept]] = {}
        for each in kept:
            by_array.setdefault(each.array.data_ptr(), []).append(each)
        for group in by_array.values():
            now = group[0].array[torch.cat([each.row_ids for each in group])]
            if not _same_bits(now, torch.cat([each.rows for each in group])):
                return group[0].table
        return None


class CleanSample:
    """The saved values of some rows of every table; rows that count as clean must equal them."""

    def __init__(self, tables: Sequence[Table], trackers: dict[str, Any]) -> None:
        self._trackers = trackers
        self._tables = [table for table in tables if device_of(table.weight) is None]
        generator = np.random.default_rng(0)
        self._row_ids = {
            table.name: np.unique(
                generator.integers(0, table.num_embeddings, _ROWS_OF_A_TABLE, dtype=np.int64)
            )
            for table in self._tables
        }
        self._saved: dict[str, dict[int, dict[str, torch.Tensor]]] = {}

    def forget(self) -> None:
        """Forget all samples: rows were restored."""
        self._saved.clear()

    def note(self, selection: Selection, first: int, count: int) -> None:
        """Record rows [first, first + count) of a selection, by position, as saved."""
        table = selection.table
        sampled = self._row_ids.get(table.name)
        if sampled is None:
            return
        if selection.row_ids is None:
            begin = selection.begin + first
            held = sampled[(sampled >= begin) & (sampled < begin + count)]
        else:
            row_ids = selection.row_ids[first : first + count]  # ascending
            places = np.searchsorted(row_ids, sampled)
            places[places == len(row_ids)] = 0
            held = sampled[row_ids[places] == sampled] if len(row_ids) else sampled[:0]
        if len(held) == 0:
            return
        rows = torch.from_numpy(held)
        copies = {name: array[rows] for name, array in table.arrays().items()}
        saved = self._saved.setdefault(table.name, {})
        for position, row_id in enumerate(held.tolist()):
            saved[row_id] = {name: copy[position] for name, copy in copies.items()}

    def find_changed(self) -> tuple[Table, int] | None:
        """Return a row that counts as clean but differs from its saved value, with its table."""
        for table in self._tables:
            saved = self._saved.get(table.name)
            if saved and table.updates_only_looked_up_rows():
                with suppress(UsageError):  # it cannot be saved any more, as its snapshot will say
                    row_id = self._find_changed(table, saved)
                    if row_id is not None:
                        return table, row_id
        return None

    def _find_changed(self, table: Table, saved: dict[int, dict[str, torch.Tensor]]) -> int | None:
        tracker = self._trackers[table.name]
        clean = [row_id for row_id in saved if tracker.is_clean(row_id, row_id + 1)]
        for name, array in table.arrays().items():
            then = {row_id: saved[row_id][name] for row_id in clean if name in saved[row_id]}
            now = array[torch.tensor(list(then), dtype=torch.int64)]
            for position, row_id in enumerate(then):
                if not _same_bits(now[position], then[row_id]):
                    return row_id
        return None


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8),
        right.contiguous().reshape(-1).view(torch.uint8),
    )
