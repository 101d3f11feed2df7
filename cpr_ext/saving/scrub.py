"""The scrub: rows that count as clean are compared with a hash of what was saved, all of them.

PyTorch counts most writes, and hooks see optimizers. Nothing sees a write through ``.data``, by
another library, or by an optimizer that moves rows without a gradient. So each captured row leaves
a hash (two bytes), and rows that no tracker calls dirty must still have it.

A pass compares all rows once, in slices that training waits for. A slice takes tens of
microseconds, and all slices take at most :data:`SHARE` of the time. Before each capture, some
rows of every table are compared as well, and of some tables after it; other ones each time. The
next snapshot finds a write to large parts of a table, and a pass one to a single row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from cpr_ext._native import native
from cpr_ext.errors import CudaError, UsageError
from cpr_ext.saving.selection import RowIds, Selection
from cpr_ext.saving.table_scrub import (
    ChangedRow,
    RowForm,
    SavedHashes,
    TableHashes,
    TableScrub,
    scrub_of,
)
from cpr_ext.state.table import Table
from cpr_ext.tracking.row_ranges import RowSpans
from cpr_ext.tracking.trackers import Tracker

#: The most of the time that a pass takes.
SHARE = 0.0005
# Training waits for these comparisons: some 128 rows of all tables, 4 to 16 of each.
_ROWS_OF_A_CHECK = 128
_ROWS_OF_A_TABLE = (4, 16)
_CHECKED_OF_A_WINDOW = 4  # tables
_PASSES_OF_A_TRIAL = 3


class Scrub:
    """Hashes of saved rows, and the passes over them.

    One thread at a time uses it: the one that captures, or the training thread; but for
    :meth:`form` and :meth:`saved`.

    Args:
        trackers: by table name.
        is_watched: whether every other way in which rows of a table could have changed was watched.
        is_rounded: snapshots have rows in fewer bits.
        pass_seconds: a pass takes at least this long.

    Attributes:
        num_passes: finished passes.
        was_whole: the last of them compared every table.
        is_known: every hash is of the saved row; else some are of the row when it was first
            compared.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        trackers: Mapping[str, Tracker],
        pool: native.ThreadPool | None,
        *,
        is_watched: Callable[[Table], bool],
        is_rounded: bool = False,
        pass_seconds: float = 600.0,
    ) -> None:
        self.num_passes = 0
        self._num_steps = 0
        self.was_whole = False
        self.is_known = True
        self._is_watched = is_watched
        self._pass_seconds = pass_seconds
        self._tables = {
            table.name: scrub_of(table, trackers[table.name], pool, is_rounded=is_rounded)
            for table in tables
        }
        self._turns = deque(self._tables.values())  # the next to check is first
        fewest, most = _ROWS_OF_A_TABLE
        self._rows_of_a_table = min(max(fewest, _ROWS_OF_A_CHECK // max(1, len(tables))), most)
        self._window: list[tuple[Selection, int, int]] = []  # captured rows, by position
        self._fixed: list[tuple[TableScrub, RowIds, Any]] = []
        self.restart()

    def restart(self) -> None:
        """Begin another pass, at the first row."""
        self._left = list(self._tables.values())
        self._is_whole = True
        for each in self._left:
            each.restart()
        self._next_slice = time.perf_counter()

    def make_memory(self) -> None:
        """Make the memory of all hashes, before training."""
        for each in self._tables.values():
            each.make_memory()

    def forget(self) -> None:
        """Forget all hashes: which rows equal their saved state is known from elsewhere."""
        for each in self._tables.values():
            each.forget()
        self.is_known = False
        self.begin_snapshot()
        self.restart()

    def record_restored(
        self, spans_of: Callable[[Table], RowSpans] | None = None, *, are_recorded: bool = False
    ) -> None:
        """Record rows that were just restored as they are.

        Args:
            spans_of: returns which rows of a table these are; None: all that no tracker calls
                dirty. Others keep their hashes: they may have changed since they were saved.
            are_recorded: the last capture of each row was saved, and is what was restored.
        """
        are_recorded = are_recorded and self.is_known
        self.is_known = self.is_known or spans_of is None
        for each in self._tables.values():
            spans = [(0, each.table.num_embeddings)] if spans_of is None else spans_of(each.table)
            with suppress(UsageError):  # of rows that cannot be compared either
                try:
                    for begin, end in spans:
                        if begin < end:
                            each.record_restored(begin, end, are_recorded=are_recorded)
                except CudaError:
                    self.is_known = False
        self.begin_snapshot()
        self.restart()

    def are_unchanged(self, table: Table, ranges: RowSpans) -> bool:
        """Return whether all rows of some ranges that count as clean have their saved hash."""
        with suppress(UsageError, CudaError):
            return self.is_known and self._tables[table.name].are_unchanged(ranges)
        return False

    def hashes_of(self, table: Table) -> TableHashes:
        """Return what is to record rows of a table when they are captured."""
        scrub = self._tables[table.name]
        return TableHashes(scrub.hashes, len(scrub.arrays()), scrub.stored)

    def restores_what_is_live(self, table: str) -> bool:
        """Return whether a recovery restores a row as memory has it until it changes."""
        return self._tables[table].stored is None

    def form(self) -> dict[str, RowForm]:
        """Return the form of each table's rows."""
        return {name: each.form for name, each in self._tables.items()}

    def saved(self) -> list[SavedHashes]:
        """Return copies of all hashes; on any thread, while no row is captured."""
        return [each.saved() for each in self._tables.values()]

    def note_captured(self, selection: Selection, first: int, count: int) -> None:
        """Note that rows [first, first + count) of a selection, by position, are captured."""
        if self._window and self._window[-1][0] is selection and self._window[-1][2] == first:
            first = self._window.pop()[1]
        self._window.append((selection, first, first + count))

    def fix(self, selections: Sequence[Selection]) -> None:
        """Record some of the rows that are saved as of now, but captured later."""
        self._fixed.clear()
        for selection in selections:
            scrub = self._tables[selection.table.name]
            if not scrub.is_on_device and selection.num_rows > 0:
                row_ids = _spread(selection, 0, selection.num_rows, self._rows_of_a_table)
                self._fixed.append((scrub, row_ids, scrub.record_rows(row_ids)))

    def begin_snapshot(self) -> None:
        """Begin a snapshot: rows of the last one that were not captured never will be."""
        self._window.clear()
        self._fixed.clear()

    def open_window(self) -> None:
        """Begin a window in which rows are captured while training only reads them."""
        self._window.clear()

    def check_window(self) -> ChangedRow | None:
        """Return a row that changed since it was captured in this window, if one of some did."""
        window, self._window = self._window, []
        for selection, first, end in window[:: 1 + len(window) // _CHECKED_OF_A_WINDOW]:
            scrub = self._tables[selection.table.name]
            if scrub.is_on_device:
                continue
            row_ids = _spread(selection, first, end - first, self._rows_of_a_table)
            # It cannot be saved any more, as its snapshot will say.
            with suppress(UsageError, CudaError):
                if (changed := scrub.compare(row_ids)) is not None:
                    return changed
        return None

    def check_some(self, *, most_tables: int | None = None) -> list[ChangedRow]:
        """Compare some rows of every table; return those found to differ, one of each call.

        Args:
            most_tables: only of so many tables, other ones each time; None: of all.
        """
        found = []
        for scrub, row_ids, then in self._fixed:
            if (changed := scrub.compare_hashes(row_ids, then)) is not None:
                found.append(changed)
        self._fixed.clear()
        for _ in range(min(len(self._turns), most_tables or len(self._turns))):
            each = self._turns[0]
            self._turns.rotate(-1)
            if self._can_compare(each.table):
                with suppress(UsageError, CudaError):
                    changed = each.compare_spread(self._rows_of_a_table) or each.collect(wait=False)
                    if changed is not None:
                        found.append(changed)
        return found

    def note_step(self) -> None:
        """Note that a step was trained."""
        self._num_steps += 1

    def take_trusted(self) -> list[Table]:
        """Trust the optimizers that have earned it; return their tables, once.

        No snapshot may be capturing then: what counts as changed follows from it.
        """
        earned = [
            each.table
            for each in self._tables.values()
            if each.trial.passes >= _PASSES_OF_A_TRIAL and each.table.may_earn_trust()
        ]
        for table in earned:
            table.is_trusted = True
        return earned

    def is_due(self) -> bool:
        """Return whether :meth:`advance` has something to do now."""
        return bool(self._left) and time.perf_counter() >= self._next_slice

    def advance(self) -> list[ChangedRow]:
        """Compare the next rows of a pass; return one that differs, if any."""
        started = time.perf_counter()
        found, size = self._advance(self._left[0].slice_bytes)
        now = time.perf_counter()
        total = sum(_nbytes(each.table) for each in self._tables.values())
        pace = self._pass_seconds * size / max(total, 1)
        self._next_slice = now + max((now - started) / SHARE, pace)
        return found

    def run_pass(self) -> list[ChangedRow]:
        """Compare the rest of the pass now; return one of each table that differs."""
        passes, found = self.num_passes, []
        while self._left and self.num_passes == passes:
            found += self._advance(1 << 62, wait=True)[0]
        return found

    def _advance(self, max_bytes: int, *, wait: bool = False) -> tuple[list[ChangedRow], int]:
        scrub, size = self._left[0], 0
        changed, is_compared = None, False
        if scrub.form and self._can_compare(scrub.table):
            with suppress(UsageError, CudaError):
                if scrub.position < scrub.table.num_embeddings:
                    changed, size = scrub.compare_slice(max_bytes)
                changed = changed or scrub.collect(wait=wait)
                is_compared = True
        # A table on trial proves nothing.
        self._is_whole &= is_compared and scrub.table.updates_only_looked_up_rows()
        if not is_compared or changed is not None or scrub.has_ended:
            self._left.pop(0)
            if scrub.has_ended:
                scrub.trial.end_pass(self._num_steps)
            if not self._left:
                self.num_passes += 1
                self.was_whole = self._is_whole
                self.restart()
        return ([] if changed is None else [changed]), size

    def _can_compare(self, table: Table) -> bool:
        is_known = table.updates_only_looked_up_rows() and self._is_watched(table)
        return is_known or table.may_earn_trust()


def _spread(selection: Selection, first: int, count: int, num_rows: int) -> RowIds:
    """Return ids of some of the rows [first, first + count) of a selection, spread over them."""
    num_rows = min(num_rows, count)
    positions = first + np.arange(num_rows, dtype=np.int64) * count // num_rows
    positions[-1] = first + count - 1
    return (
        positions + selection.begin if selection.row_ids is None else selection.row_ids[positions]
    )


def _nbytes(table: Table) -> int:
    return table.weight.nbytes
