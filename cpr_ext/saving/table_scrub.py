"""The hashes of one table's saved rows, and comparisons with them.

A table on a GPU has its hashes there. The GPU compares, in training's stream; what it found is
read at a later step, so that nothing waits for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from cpr_ext._native import native
from cpr_ext.runtime.cuda import device_of
from cpr_ext.saving.selection import RowIds
from cpr_ext.state.slot_keys import is_key_array
from cpr_ext.state.table import Table
from cpr_ext.tracking.row_ranges import RowSpans
from cpr_ext.tracking.trackers import Tracker, native_trackers

_ROWS_OF_A_DEVICE_TABLE = 4096
_SLICE_BYTES = 256 << 10
_DEVICE_SLICE_BYTES = 64 << 20  # some tens of microseconds of a GPU
_ROWS_OF_A_COPY = 1 << 20
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


class TableHashes(NamedTuple):
    """The native hashes in which captured rows are recorded.

    Attributes:
        hashes: of the first ``num_arrays`` arrays of a row, as it is captured.
        stored: of all of a row, as a recovery would restore it; None: not recorded.
    """

    hashes: Any
    num_arrays: int
    stored: Any


@dataclass
class Trial:
    """Whether an optimizer that is not known leaves rows without a gradient alone.

    Attributes:
        passes: passes without a difference, one after the other.
    """

    passes: int = 0
    _num_compared: int = 0
    _since: int | None = 0  # the step of the last pass that counted; None: a row differed since

    def note(self, are_same: bool, num_compared: int) -> None:
        """Note that rows without a gradient were compared."""
        self._num_compared += num_compared
        if not are_same:
            self.passes = self._num_compared = 0
            self._since = None

    def end_pass(self, step: int) -> None:
        """Note that all rows were compared; over too few steps that shows nothing."""
        if self._since is None:
            self._since = step
        if step - self._since >= _STEPS_OF_A_TRIAL and self._num_compared > 0:
            self.passes += 1
            self._since, self._num_compared = step, 0


class TableScrub:
    """The hashes of one table.

    Keys of rows are left out: they may change at any time, and :class:`KeyWatch` compares them all.

    Args:
        is_rounded: snapshots have rows in fewer bits.

    Attributes:
        form: of the rows that have hashes; empty: none has.
        stored: the native hashes of rows as a recovery would restore them, keys included; None:
            a recovery restores what is in memory.
        trial: of an optimizer that is not known.
        position: the row at which the current pass resumes.
        slice_bytes: of the rows that one slice compares.
    """

    slice_bytes = _SLICE_BYTES
    is_on_device = False

    def __init__(
        self, table: Table, tracker: Tracker, pool: native.ThreadPool | None, *, is_rounded: bool
    ) -> None:
        self.table = table
        self.position = 0
        self._tracker = native_trackers(tracker)[0]
        self._pool = pool
        self._hashes = self._make_hashes()
        differs = is_rounded or table.slots is not None
        self.stored = _on_host(table) if differs else None
        self.form: RowForm = ()
        self._shift = 0
        self.trial = Trial()

    def _make_hashes(self) -> Any:
        return _on_host(self.table)

    def arrays(self) -> list[torch.Tensor]:
        """Return all of a row but its key; hashes of other arrays are forgotten."""
        arrays = self.table.clean_arrays()
        form = tuple((name, a.dtype, tuple(a.shape[1:])) for name, a in arrays.items())
        if form != self.form:
            if self.form:
                self.forget()
            self.form = form
        return [array for name, array in arrays.items() if not is_key_array(name)]

    def make_memory(self) -> None:
        """Make the memory of all hashes, before training."""
        for hashes in (self._hashes, self.stored):
            if hashes is not None:
                hashes.make_memory()

    def forget(self) -> None:
        """Forget all hashes: rows may have any values."""
        self._hashes.forget()
        if self.stored is not None:
            self.stored.forget()

    @property
    def hashes(self) -> Any:
        """The native hashes, for rows that are captured now."""
        self.arrays()
        return self._hashes

    def saved(self) -> SavedHashes:
        """Return a copy of the hashes of what a recovery restores.

        It is made in short calls: another thread may want them.
        """
        hashes = self._hashes if self.stored is None else self.stored
        return SavedHashes(
            self.table.name, self.form, _values_of(hashes, 0, self.table.num_embeddings)
        )

    def record_restored(self, begin: int, end: int, *, are_recorded: bool) -> None:
        """Record rows [begin, end) as they are, which is what files restore.

        Args:
            are_recorded: those that were captured have their hashes from then.
        """
        if are_recorded and self.stored is None and not self.is_on_device:
            self._hashes.record_unknown(self.arrays(), begin, end, self._pool)
        else:
            self._hashes.record_range(self.arrays(), begin, end, self._pool)
        if self.stored is not None:
            hashes = self._make_hashes()
            arrays = list(self.table.arrays().values())
            hashes.record_range(arrays, begin, end, self._pool)
            self.stored.assign(_values_of(hashes, begin, end), begin)

    def record_rows(self, row_ids: RowIds) -> Any:
        """Record rows as they are; return their hashes."""
        self._hashes.record(self.arrays(), row_ids)
        return self._hashes.values(row_ids)

    def compare_hashes(self, row_ids: RowIds, then: Any) -> ChangedRow | None:
        """Return a clean row whose hash was another one then."""
        differing = row_ids[self._hashes.values(row_ids) != then]
        for row_id in differing.tolist():
            if self._tracker.is_clean(row_id, row_id + 1):
                return ChangedRow(self.table, row_id)
        return None

    def compare(self, row_ids: RowIds) -> ChangedRow | None:
        """Compare the clean ones of rows (n,) int64, ascending; return one that differs."""
        return self._judged(*self._hashes.compare(self.arrays(), self._tracker, row_ids))

    def compare_range(self, begin: int, end: int) -> ChangedRow | None:
        """Compare the clean rows of [begin, end); return one that differs."""
        return self._judged(*self._hashes.compare_range(self.arrays(), self._tracker, begin, end))

    def _judged(self, row_id: int, num_compared: int, _: int) -> ChangedRow | None:
        """Return a row that differs; in a trial that is no fault, but ends it."""
        if self.table.may_earn_trust():
            self.trial.note(row_id < 0, num_compared)
            return None
        if row_id >= 0 and self.table.is_trusted:
            self.table.is_trusted = None  # for good
        return None if row_id < 0 else ChangedRow(self.table, row_id)

    def compare_spread(self, num_rows: int) -> ChangedRow | None:
        """Compare about so many rows, other ones each time; return one that differs."""
        if not self.form:
            return None  # nothing was saved yet
        stride = max(1, self.table.num_embeddings // num_rows)
        row_ids = np.arange(self._shift % stride, self.table.num_embeddings, stride)
        self._shift += 1
        return self.compare(row_ids)

    def are_unchanged(self, ranges: RowSpans) -> bool:
        """Return whether all clean rows of some ranges have their hash, which all have."""
        if not self.form:
            return False
        for begin, end in ranges:
            row_id, _, recorded = self._compare_now(self.arrays(), begin, end)
            if row_id >= 0 or recorded:
                return False
        return True

    def _compare_now(self, arrays: list[torch.Tensor], begin: int, end: int) -> Any:
        return self._hashes.compare_range(arrays, self._tracker, begin, end)

    def compare_slice(self, max_bytes: int) -> tuple[ChangedRow | None, int]:
        """Compare rows from the position on; return what differs, and the rows' bytes."""
        row_bytes = sum(array[:1].nbytes for array in self.arrays())
        begin = self.position
        end = min(self.table.num_embeddings, begin + max(1, max_bytes // row_bytes))
        changed = self.compare_range(begin, end)
        self.position = end
        return changed, (end - begin) * row_bytes

    def collect(self, *, wait: bool) -> ChangedRow | None:
        """Return a row that differs of comparisons that were begun before."""
        return None

    @property
    def has_ended(self) -> bool:
        """Whether the pass has compared all rows."""
        return self.position == self.table.num_embeddings

    def restart(self) -> None:
        """Begin another pass, at the first row."""
        self.position = 0


class _DeviceScrub(TableScrub):
    """The hashes of a table on a GPU, in its memory."""

    slice_bytes = _DEVICE_SLICE_BYTES
    is_on_device = True

    def __init__(
        self,
        table: Table,
        tracker: Tracker,
        pool: native.ThreadPool | None,
        device: int,
        *,
        is_rounded: bool,
    ) -> None:
        self._device = device
        self._pending: deque[Any] = deque()
        super().__init__(table, tracker, pool, is_rounded=is_rounded)

    def _make_hashes(self) -> Any:
        return native.DeviceRowHashes(
            name=self.table.name,
            num_rows=self.table.num_embeddings,
            device=self._device,
        )

    def forget(self) -> None:
        self._pending.clear()
        super().forget()

    def restart(self) -> None:
        self._pending.clear()
        super().restart()

    def compare_range(self, begin: int, end: int) -> ChangedRow | None:
        self._begin(begin, end)
        return None

    def compare_spread(self, num_rows: int) -> ChangedRow | None:
        if self.form:
            end = self.table.num_embeddings
            stride = max(1, end // _ROWS_OF_A_DEVICE_TABLE)
            self._begin(self._shift % stride, end, stride)
            self._shift += 1
        return None

    def _begin(self, begin: int, end: int, stride: int = 1) -> None:
        arrays = self.arrays()
        self._pending.append(self._hashes.begin_compare(arrays, self._tracker, begin, end, stride))

    def _compare_now(self, arrays: list[torch.Tensor], begin: int, end: int) -> Any:
        return self._hashes.begin_compare(arrays, self._tracker, begin, end).read()

    def collect(self, *, wait: bool) -> ChangedRow | None:
        found = None
        while self._pending and (wait or self._pending[0].is_ready()):
            changed = self._judged(*self._pending.popleft().read())
            found = found or changed
        return found

    @property
    def has_ended(self) -> bool:
        return super().has_ended and not self._pending


def scrub_of(
    table: Table, tracker: Tracker, pool: native.ThreadPool | None, *, is_rounded: bool
) -> TableScrub:
    """Return the hashes of a table, in the memory that has the table."""
    device = device_of(table.weight)
    if device is None:
        return TableScrub(table, tracker, pool, is_rounded=is_rounded)
    return _DeviceScrub(table, tracker, pool, device, is_rounded=is_rounded)


def _on_host(table: Table) -> Any:
    return native.HostRowHashes(name=table.name, num_rows=table.num_embeddings)


def _values_of(hashes: Any, begin: int, end: int) -> Any:
    pieces = [
        hashes.range_values(first, min(first + _ROWS_OF_A_COPY, end))
        for first in range(begin, end, _ROWS_OF_A_COPY)
    ]
    return np.concatenate(pieces)
