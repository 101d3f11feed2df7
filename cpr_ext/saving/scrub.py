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
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from cpr_ext._native import native
from cpr_ext.cuda import device_of
from cpr_ext.errors import UsageError
from cpr_ext.saving.selection import RowIds, Selection
from cpr_ext.state.table import Table
from cpr_ext.tracking.row_ranges import RowSpans

#: The most of the time that a pass takes.
SHARE = 0.0005
_SLICE_BYTES = 256 << 10
_ROWS_OF_A_TABLE = 16
_CHECKED_OF_A_WINDOW = 4  # tables; training waits for it
_ROWS_OF_A_COPY = 1 << 20
_PASSES_OF_A_TRIAL = 3
_STEPS_OF_A_TRIAL = 1000


@dataclass(frozen=True)
class ChangedRow:
    """A row that counts as clean but differs from its saved value."""

    table: Table
    row_id: int


#: The name, dtype and row shape of each array that belongs to a row.
RowForm = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


class SavedHashes(NamedTuple):
    """Hashes (num_rows,) uint16 of a table's rows as saved; 0: not known."""

    table: str
    form: RowForm
    values: Any


@dataclass
class Trial:
    """Whether an optimizer that is not known leaves rows without a gradient alone.

    Attributes:
        steps: steps since the last pass that counted.
        passes: passes without a difference, one after the other.
    """

    steps: int = 0
    passes: int = 0
    _num_compared: int = 0

    def note(self, are_same: bool, num_compared: int) -> None:
        """Note that rows without a gradient were compared."""
        self._num_compared += num_compared
        if not are_same:
            self.steps = self.passes = self._num_compared = 0

    def end_pass(self) -> None:
        """Note that all rows were compared; over too few steps that shows nothing."""
        if self.steps >= _STEPS_OF_A_TRIAL and self._num_compared > 0:
            self.passes += 1
            self.steps = self._num_compared = 0


class _TableScrub:
    """The hashes of one table.

    Attributes:
        form: of the rows that have hashes; empty: none has.
        trial: of an optimizer that is not known.
        position: the row at which the current pass resumes.
    """

    def __init__(self, table: Table, tracker: Any, pool: Any) -> None:
        self.table = table
        self.position = 0
        self._tracker = tracker
        self._pool = pool
        self._hashes = native.RowHashes(name=table.name, num_rows=table.num_embeddings)
        self.form: RowForm = ()
        count = min(_ROWS_OF_A_TABLE, table.num_embeddings)
        self._spread = np.arange(count, dtype=np.int64) * table.num_embeddings // count
        self._shift = 0
        self.trial = Trial()

    def _arrays(self) -> list[torch.Tensor]:
        """Return all that belongs to rows; hashes of other arrays are forgotten."""
        arrays = self.table.arrays()
        form = tuple((name, a.dtype, tuple(a.shape[1:])) for name, a in arrays.items())
        if form != self.form:
            if self.form:
                self._hashes.forget()
            self.form = form
        return list(arrays.values())

    def forget(self) -> None:
        self._hashes.forget()

    @property
    def hashes(self) -> Any:
        """The native hashes, for rows that are captured now."""
        self._arrays()
        return self._hashes

    def saved(self) -> SavedHashes:
        """Return a copy of the hashes, made in short calls: another thread may want them."""
        num_rows = self.table.num_embeddings
        pieces = [
            self._hashes.range_values(begin, min(begin + _ROWS_OF_A_COPY, num_rows))
            for begin in range(0, num_rows, _ROWS_OF_A_COPY)
        ]
        return SavedHashes(self.table.name, self.form, np.concatenate(pieces))

    def record_all(self) -> None:
        self._hashes.record_range(self._arrays(), 0, self.table.num_embeddings, self._pool)

    def record_rows(self, row_ids: RowIds) -> Any:
        """Record rows as they are; return their hashes."""
        self._hashes.record(self._arrays(), row_ids)
        return self._hashes.values(row_ids)

    def compare_hashes(self, row_ids: RowIds, then: Any) -> ChangedRow | None:
        """Return a clean row whose hash was another one then."""
        differing = row_ids[self._hashes.values(row_ids) != then]
        for row_id in differing.tolist():
            if self._tracker.is_clean(row_id, row_id + 1):
                return ChangedRow(self.table, row_id)
        return None

    def compare(self, row_ids: RowIds) -> ChangedRow | None:
        row_id, compared, _ = self._hashes.compare(self._arrays(), self._tracker, row_ids)
        return self._judged(row_id, compared)

    def _judged(self, row_id: int, num_compared: int) -> ChangedRow | None:
        """Return a row that differs; in a trial that is no fault, but ends it."""
        if self.table.may_earn_trust():
            self.trial.note(row_id < 0, num_compared)
            return None
        if row_id >= 0 and self.table.is_trusted:
            self.table.is_trusted = None  # for good
        return None if row_id < 0 else ChangedRow(self.table, row_id)

    def compare_spread(self) -> ChangedRow | None:
        if not self.form:
            return None  # nothing was saved yet
        row_ids = (self._spread + self._shift) % self.table.num_embeddings
        self._shift += 1
        return self.compare(row_ids)

    def are_unchanged(self, ranges: RowSpans) -> bool:
        """Return whether all clean rows of some ranges have their hash, which all have."""
        if not self.form:
            return False
        arrays = self._arrays()
        for begin, end in ranges:
            row_id, _, recorded = self._hashes.compare_range(arrays, self._tracker, begin, end)
            if row_id >= 0 or recorded:
                return False
        return True

    def compare_slice(self, max_bytes: int) -> tuple[ChangedRow | None, int]:
        """Compare rows from the position on; return what differs, and the rows' bytes."""
        if not self.form:
            return None, 0
        arrays = self._arrays()
        row_bytes = sum(array[:1].nbytes for array in arrays)
        begin = self.position
        end = min(self.table.num_embeddings, begin + max(1, max_bytes // row_bytes))
        row_id, compared, _ = self._hashes.compare_range(arrays, self._tracker, begin, end)
        self.position = end
        return self._judged(row_id, compared), (end - begin) * row_bytes


class Scrub:
    """Hashes of saved rows, and the passes over them.

    One thread at a time uses it: the one that captures, or the training thread; but for
    :meth:`form` and :meth:`saved`.

    Args:
        trackers: by table name.
        is_watched: whether every other way in which rows of a table could have changed was watched.
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
        trackers: Mapping[str, Any],
        pool: Any,
        *,
        is_watched: Callable[[Table], bool],
        pass_seconds: float = 600.0,
    ) -> None:
        self.num_passes = 0
        self.was_whole = False
        self._num_tables = len(tables)
        self.is_known = True
        self._is_watched = is_watched
        self._pass_seconds = pass_seconds
        self._tables = {
            table.name: _TableScrub(table, trackers[table.name], pool)
            for table in tables
            if device_of(table.weight) is None
        }
        self._turns = deque(self._tables.values())  # the next to check is first
        self._window: list[tuple[Selection, int, int]] = []  # captured rows, by position
        self._fixed: list[tuple[_TableScrub, RowIds, Any]] = []
        self.restart()

    def restart(self) -> None:
        """Begin another pass, at the first row."""
        self._left = list(self._tables.values())
        self._is_whole = len(self._left) == self._num_tables
        for each in self._left:
            each.position = 0
        self._next_slice = time.perf_counter()

    def forget(self) -> None:
        """Forget all hashes: which rows equal their saved state is known from elsewhere."""
        for each in self._tables.values():
            each.forget()
        self.is_known = False
        self.begin_snapshot()
        self.restart()

    def record_all(self) -> None:
        """Record all rows as they are: those that no tracker calls dirty were just restored."""
        for each in self._tables.values():
            with suppress(UsageError):
                each.record_all()
        self.is_known = True
        self.begin_snapshot()
        self.restart()

    def are_unchanged(self, table: Table, ranges: RowSpans) -> bool:
        """Return whether all rows of some ranges that count as clean have their saved hash."""
        scrub = self._tables.get(table.name)
        if scrub is None or not self.is_known:
            return False
        with suppress(UsageError):
            return scrub.are_unchanged(ranges)
        return False

    def hashes_of(self, table: Table) -> Any:
        """Return what is to record rows of a table when they are captured; None: nothing."""
        scrub = self._tables.get(table.name)
        return None if scrub is None else scrub.hashes

    def form(self) -> dict[str, RowForm] | None:
        """Return the form of each table's rows; None: a table has no hashes."""
        if len(self._tables) < self._num_tables:
            return None
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
            scrub = self._tables.get(selection.table.name)
            if scrub is not None and selection.num_rows > 0:
                row_ids = _spread(selection, 0, selection.num_rows, _ROWS_OF_A_TABLE)
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
            scrub = self._tables.get(selection.table.name)
            if scrub is None:
                continue
            row_ids = _spread(selection, first, end - first, _ROWS_OF_A_TABLE)
            with suppress(UsageError):  # it cannot be saved any more, as its snapshot will say
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
                with suppress(UsageError):
                    if (changed := each.compare_spread()) is not None:
                        found.append(changed)
        return found

    def note_step(self) -> None:
        """Note that a step was trained."""
        for each in self._tables.values():
            each.trial.steps += 1

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
        found, size = self._advance(_SLICE_BYTES)
        now = time.perf_counter()
        total = sum(_nbytes(each.table) for each in self._tables.values())
        pace = self._pass_seconds * size / max(total, 1)
        self._next_slice = now + max((now - started) / SHARE, pace)
        return found

    def run_pass(self) -> list[ChangedRow]:
        """Compare the rest of the pass now; return one of each table that differs."""
        passes, found = self.num_passes, []
        while self._left and self.num_passes == passes:
            found += self._advance(1 << 62)[0]
        return found

    def _advance(self, max_bytes: int) -> tuple[list[ChangedRow], int]:
        scrub, size = self._left[0], 0
        changed = None
        if self._can_compare(scrub.table):
            with suppress(UsageError):
                changed, size = scrub.compare_slice(max_bytes)
        # A table on trial proves nothing.
        self._is_whole &= size > 0 and scrub.table.updates_only_looked_up_rows()
        if size == 0 or changed is not None or scrub.position == scrub.table.num_embeddings:
            self._left.pop(0)
            if scrub.position == scrub.table.num_embeddings:
                scrub.trial.end_pass()
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
