"""Hashes of saved rows: rows that count as clean must still have theirs.

PyTorch counts most writes, and hooks see optimizers. Nothing sees a write through ``.data``, by
another library, or by an optimizer that moves rows without a gradient. So each captured row leaves
a hash (two bytes), and rows that no tracker calls dirty must still have it. Keys of rows are left
out: they may change at any time, and :class:`KeyWatch` compares them all.

A pass compares all rows once. Those of tables on the host are compared in slices. Those of tables
on a GPU are compared at once, in training's stream; what it found is read at a later step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.errors import CudaError, UsageError
from cpr_ext.runtime.cuda import device_of
from cpr_ext.state.slot_keys import is_key_array
from cpr_ext.state.table import Table
from cpr_ext.tracking.outside_changes import RowSpans


@dataclass(frozen=True)
class ChangedRow:
    """A row that counts as clean but differs from its saved value."""

    table: Table
    row_id: int


class UnknownRowsError(Exception):
    """Rows cannot be compared with what was saved; says why."""


#: What records captured rows, as the native pipeline takes it: hashes of so many arrays of a row,
#: the first ones; None: nothing does.
RecordedHashes = tuple[native.RowHashes | None, int]


class TableHashes:
    """The hashes of one table in the host's memory.

    Attributes:
        position: the row at which the current pass resumes.
        native, tracker: the native ones.
    """

    is_on_device = False

    def __init__(
        self, table: Table, tracker: native.RowTracker, pool: native.ThreadPool | None
    ) -> None:
        self.table = table
        self.position = 0
        self.tracker = tracker
        self._pool = pool
        self.native = self._make()
        #: The name, dtype and row shape of each array of rows that have hashes; empty: none has.
        self.form: Any = ()

    def _make(self) -> Any:
        return native.HostRowHashes(name=self.table.name, num_rows=self.table.num_embeddings)

    def make_memory(self) -> None:
        """Make the memory of all hashes, before training."""
        self.native.make_memory()

    def arrays(self) -> list[torch.Tensor]:
        """Return all of a row but its key; hashes of other arrays are forgotten."""
        return self._hashed(self.table.clean_arrays())

    def _hashed(self, arrays: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        form = tuple((name, a.dtype, tuple(a.shape[1:])) for name, a in arrays.items())
        if form != self.form:
            if self.form:
                self.forget()
            self.form = form
        return [array for name, array in arrays.items() if not is_key_array(name)]

    def forget(self) -> None:
        """Forget all hashes: rows may have any values."""
        self.native.forget()

    def recorder(self, arrays: Mapping[str, torch.Tensor]) -> RecordedHashes:
        """Return what records rows of the table's arrays that are captured now."""
        return self.native, len(self._hashed(arrays))

    def record_range(self, begin: int, end: int) -> None:
        """Record rows [begin, end) as they are, which is as they are saved."""
        self.native.record_range(self.arrays(), begin, end, self._pool)

    def are_unchanged(self, ranges: RowSpans) -> bool:
        """Return whether all clean rows of some ranges have their hash, which all have."""
        for begin, end in ranges:
            row_id, _, unknown = self._compare_now(self.arrays(), begin, end)
            if row_id >= 0 or unknown:
                return False
        return True

    def hold_all(self) -> bool:
        """Return whether no row differs from what was saved, and none is dirty."""
        rows = self.table.num_embeddings
        return self.tracker.is_clean(0, rows) and self.are_unchanged([(0, rows)])

    def _compare_now(self, arrays: list[torch.Tensor], begin: int, end: int) -> Any:
        return self.native.compare_range(arrays, self.tracker, begin, end)

    def restart(self) -> None:
        """Begin a pass, at the first row."""
        self.position = 0

    def end(self) -> None:
        """End a pass, and let go of what it holds."""
        self.position = 0

    def compare_next(self, max_bytes: int) -> tuple[ChangedRow | None, int]:
        """Compare the next rows of a pass; return what differs, and the rows' bytes.

        Raises:
            UnknownRowsError: the hash of a clean row is not known.
        """
        arrays = self.arrays()
        row_bytes = sum(array[:1].nbytes for array in arrays)
        begin = self.position
        end = min(self.table.num_embeddings, begin + max(1, max_bytes // row_bytes))
        changed = self._judged(*self._compare_now(arrays, begin, end))
        self.position = end
        return changed, (end - begin) * row_bytes

    def _judged(self, row_id: int, _: int, num_unknown: int) -> ChangedRow | None:
        if num_unknown and row_id < 0:
            text = f"{num_unknown} rows of '{self.table.name}' were not saved as they are"
            raise UnknownRowsError(text)
        return self._changed(row_id)

    def _changed(self, row_id: int) -> ChangedRow | None:
        return None if row_id < 0 else ChangedRow(self.table, row_id)

    @property
    def has_ended(self) -> bool:
        """Whether the pass has compared all rows."""
        return self.position == self.table.num_embeddings


class _DeviceHashes(TableHashes):
    """The hashes of a table on a GPU, in its memory."""

    is_on_device = True

    def __init__(
        self, table: Table, tracker: native.RowTracker, pool: native.ThreadPool | None, device: int
    ) -> None:
        self._device = device
        self._pass: Any = None
        super().__init__(table, tracker, pool)

    def _make(self) -> Any:
        return native.DeviceRowHashes(
            name=self.table.name, num_rows=self.table.num_embeddings, device=self._device
        )

    def forget(self) -> None:
        self.end()
        super().forget()

    def restart(self) -> None:
        """Begin a pass, all of it, in training's stream."""
        self.position = 0
        rows = self.table.num_embeddings
        self._pass = self.native.begin_compare(self.arrays(), self.tracker, 0, rows)

    def end(self) -> None:
        """End a pass: nothing of it is freed later, when a graph may be captured."""
        super().end()
        self._pass = None

    def _compare_now(self, arrays: list[torch.Tensor], begin: int, end: int) -> Any:
        return self.native.begin_compare(arrays, self.tracker, begin, end).read()

    def compare_next(self, max_bytes: int) -> tuple[ChangedRow | None, int]:
        """Read what the pass has found if it has ended; ``max_bytes`` of 2^62: wait for it."""
        if self._pass is None:
            raise UnknownRowsError(f"the optimizer has made new state of '{self.table.name}'")
        if max_bytes >= ALL_BYTES or self._pass.is_ready():
            found, self._pass = self._pass.read(), None
            self.position = self.table.num_embeddings
            return self._judged(*found), 0
        return None, 0


#: Of :meth:`SavedHashes.advance`: the whole rest of a pass.
ALL_BYTES = 1 << 62


class SavedHashes:
    """The hashes of all tables, and the passes over them.

    One thread at a time uses it: the one that captures, or the training thread.

    Args:
        trackers: by table name.

    Attributes:
        is_overwritten: clean rows that the pass has not compared yet have other hashes now.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        trackers: Mapping[str, native.RowTracker],
        pool: native.ThreadPool | None,
    ) -> None:
        self._tables = {
            table.name: _hashes_of(table, trackers[table.name], pool) for table in tables
        }
        self._pool = pool
        self._left: deque[TableHashes] = deque()
        self._is_passing = False
        self.bytes_compared = 0  # by all passes, of tables on the host
        self.is_overwritten = False

    def make_memory(self) -> None:
        """Make the memory of all hashes, before training."""
        for each in self._tables.values():
            each.make_memory()

    def forget(self) -> None:
        """Forget all hashes: which rows equal their saved state is known from elsewhere."""
        for each in self._tables.values():
            each.forget()

    def note_whole(self, table: Table) -> None:
        """Note that all rows of a table are recorded from now on, clean ones, too."""
        hashes = self._tables[table.name]
        if not hashes.is_on_device and hashes in self._left:
            self.is_overwritten = True

    def forget_table(self, table: Table) -> None:
        """Forget the hashes of one table."""
        self._tables[table.name].forget()

    def record_restored(self, spans_of: Callable[[Table], RowSpans] | None = None) -> None:
        """Record rows that were just restored as they are.

        Args:
            spans_of: returns which rows of a table these are, ranges [begin, end); None: all.
        """
        for each in self._tables.values():
            spans = [(0, each.table.num_embeddings)] if spans_of is None else spans_of(each.table)
            try:
                for begin, end in spans:
                    if begin < end:
                        each.record_range(begin, end)
            except (UsageError, CudaError):  # they cannot be compared later, either
                each.forget()

    def are_unchanged(self, table: Table, ranges: RowSpans) -> bool:
        """Return whether all rows of some ranges that count as clean have their saved hash."""
        try:
            return self._tables[table.name].are_unchanged(ranges)
        except (UsageError, CudaError):
            return False

    def unsaved_table(self) -> str | None:
        """Return the name of a table with a row that differs from what was saved; None: none."""
        for name, each in self._tables.items():
            try:
                if not each.hold_all():
                    return name
            except (UsageError, CudaError):
                return name
        return None

    def recorder_of(self, table: Table, arrays: Mapping[str, torch.Tensor]) -> RecordedHashes:
        """Return what is to record rows of a table's arrays when they are captured."""
        return self._tables[table.name].recorder(arrays)

    def form_of(self, table: Table) -> object:
        """Return what stays the same object while a table's hashes are of the same arrays."""
        return self._tables[table.name].form

    def check_changing(
        self, changing: Iterable[tuple[Table, torch.Tensor]]
    ) -> Iterator[ChangedRow]:
        """Compare rows (n,) of tables on the host that are about to change, some repeated.

        Those of tables that the pass has compared already are left out.
        """
        given = []
        for table, row_ids in changing:
            hashes = self._tables[table.name]
            if hashes.is_on_device or (self._is_passing and hashes not in self._left):
                continue
            with suppress(UsageError, CudaError):
                ids = row_ids.reshape(-1).to(device="cpu", dtype=torch.int64).contiguous()
                given.append((hashes, hashes.arrays(), ids))
        found = native.compare_changing(
            [hashes.native for hashes, _, _ in given],
            [arrays for _, arrays, _ in given],
            [hashes.tracker for hashes, _, _ in given],
            [row_ids for _, _, row_ids in given],
            self._pool,
        )
        for (hashes, _, _), (row_id, _, _) in zip(given, found, strict=True):
            if row_id >= 0:
                yield ChangedRow(hashes.table, row_id)

    def begin_pass(self, tables: Collection[str]) -> None:
        """Begin a pass over tables of these names.

        Raises:
            UnknownRowsError: a table cannot be compared.
        """
        self.is_overwritten = False
        # Small ones first: each snapshot holds them whole, and records all their rows.
        wanted = (each for name, each in self._tables.items() if name in tables)
        self._left = deque(sorted(wanted, key=lambda each: each.table.num_embeddings))
        self._is_passing = True
        with _as_unknown():
            for each in self._left:
                each.restart()

    def end_pass(self) -> None:
        """End a pass, whether it has compared all rows or not."""
        self._left.clear()
        self.is_overwritten = self._is_passing = False
        for each in self._tables.values():
            each.end()

    def advance(self, max_bytes: int) -> tuple[list[ChangedRow], bool]:
        """Compare the next rows of a pass, of about so many bytes.

        Returns:
            One row of each table that differs, after which no more of that table is compared; and
            whether the pass has ended.

        Raises:
            UnknownRowsError: a table cannot be compared, or its clean rows have no hash.
        """
        if self.is_overwritten:
            raise UnknownRowsError("a later snapshot holds all rows before they were compared")
        found, waiting = [], []
        with _as_unknown():
            while self._left and max_bytes > 0:
                hashes = self._left[0]
                changed, num_bytes = hashes.compare_next(max_bytes)
                self.bytes_compared += num_bytes
                if max_bytes < ALL_BYTES:
                    max_bytes -= num_bytes
                if changed is not None:
                    found.append(changed)
                if changed is not None or hashes.has_ended:
                    self._left.popleft()
                elif hashes.is_on_device:
                    waiting.append(self._left.popleft())
        self._left.extend(waiting)
        return found, not self._left


@contextmanager
def _as_unknown() -> Iterator[None]:
    """Raise UnknownRowsError for what cannot be compared."""
    try:
        yield
    except (UsageError, CudaError) as error:
        raise UnknownRowsError(str(error)) from error


def _hashes_of(
    table: Table, tracker: native.RowTracker, pool: native.ThreadPool | None
) -> TableHashes:
    """Return the hashes of a table, in the memory that has the table."""
    device = device_of(table.weight)
    if device is None:
        return TableHashes(table, tracker, pool)
    return _DeviceHashes(table, tracker, pool, device)
