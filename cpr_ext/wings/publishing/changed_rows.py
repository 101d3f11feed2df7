"""The rows that commits brought since a position, each in its newest state.

Segments are read newest first, chunk by chunk, and a row is yielded where it is found first. Which
rows were found is noted for a window of row ids at a time. So the memory is that of one chunk,
which a slot of the writer held, and of one window.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from cpr_ext.errors import DamageError, StoreError, UsageError
from cpr_ext.recovery.restore import read_dense
from cpr_ext.state.dtypes import DTYPE_NAMES
from cpr_ext.state.position import is_count
from cpr_ext.state.slot_keys import KEY
from cpr_ext.state.table import WEIGHT
from cpr_ext.storage.locks import reader_lease
from cpr_ext.storage.manifest import SegmentRecord, StoredTable
from cpr_ext.storage.segment_format import Segment
from cpr_ext.storage.segment_reader import ChunkRows, SegmentRows
from cpr_ext.storage.store_reader import NewestRows, StoreReader, read_committed


@dataclass(frozen=True)
class RowBatch:
    """The newest state of some rows of one table.

    Attributes:
        number: counts the batches of one iteration, from 0.
        table: its name in the store.
        row_ids: (n,) int64, ascending; of a keyed table: the slots.
        arrays: ``weight`` (n, embedding_dim); of a keyed table ``key`` (n,) int64, the id that each
            row belongs to now, -1: to none; and per-row optimizer states if they were asked for.
        step: none of the rows was captured after it. A repair may note a newer step than a row's
            own.
    """

    number: int
    table: str
    row_ids: torch.Tensor
    arrays: dict[str, torch.Tensor]
    step: int

    def to_arrow(self) -> Any:
        """Return a ``pyarrow.RecordBatch``: ``row_id``, one list column per array, ``step``.

        Values keep their bits. Arrow has no bfloat16: its values are uint16, and the field's
        metadata records the dtype. So it does for each column, as ``dtype``.
        """
        import pyarrow as pa

        count = len(self.row_ids)
        step = torch.full((count,), self.step, dtype=torch.int64)
        columns = {"row_id": self.row_ids, **self.arrays, "step": step}
        fields, values = [], []
        for name, tensor in columns.items():
            column = _arrow_column(tensor)
            described = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": str(list(tensor.shape[1:]))}
            fields.append(pa.field(name, column.type, nullable=False, metadata=described))
            values.append(column)
        schema = pa.schema(fields, metadata={"table": self.table})
        return pa.RecordBatch.from_arrays(values, schema=schema)


def _arrow_column(tensor: torch.Tensor) -> Any:
    import pyarrow as pa

    flat = tensor.contiguous().reshape(-1)
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.uint16)
    values = pa.array(flat.numpy())
    if tensor.dim() == 1:
        return values
    return pa.FixedSizeListArray.from_arrays(values, tensor[0].numel() if len(tensor) else 1)


class PositionError(StoreError):
    """The changes since a position are not known: a full copy is needed."""


@dataclass(frozen=True)
class StorePosition:
    """One committed state of a store.

    Attributes:
        model: digest of the store's tables.
        snapshot, step, num_samples: of the newest snapshot that was committed as a whole.
        rows: the id of the snapshot that wrote the newest segment of rows; empty: none.
    """

    model: str
    snapshot: int
    step: int
    num_samples: int
    rows: str

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> StorePosition:
        """Invert :meth:`to_json`.

        Raises:
            DamageError: it is no position.
        """
        try:
            position = cls(**value)
        except TypeError as error:
            raise DamageError(f"not a position in a store: {error!r:.200}") from error
        counts = (position.snapshot, position.step, position.num_samples)
        digests = (position.model, position.rows)
        if not all(map(is_count, counts)) or not all(isinstance(text, str) for text in digests):
            raise DamageError(f"not a position in a store: {value!r:.200}")
        return position


def model_digest(reader: StoreReader) -> str:
    """Return a digest of what a store holds rows of."""
    tables = [
        (name, table.num_embeddings, table.embedding_dim, DTYPE_NAMES[table.dtype])
        for name, table in sorted(reader.tables.items())
    ]
    text = json.dumps(tables)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


OnGap = Literal["raise", "copy"]
WINDOW_ROWS = 1 << 26  # a byte of memory each

# Of which rows of a window the newest state was found. numpy: torch would split such short work.
Found = npt.NDArray[np.bool_]
Wanted = torch.Tensor | slice | None  # positions in a chunk; None: of none of its rows


class ChangedRows:
    """An iterable of :class:`RowBatch`: what changed between two committed states of a store.

    Each iteration yields the same batches in the same order, table by table. It fails once
    a process that trains has removed files of this state; then ask for the changes again.

    Attributes:
        since: where the changes begin; None: all rows of the store.
        until: the position of a consumer that has applied every batch.
        is_copy: all rows are yielded.
    """

    def __init__(
        self,
        reader: StoreReader,
        since: StorePosition | None,
        until: StorePosition,
        segments: Sequence[Segment],
        ids: Collection[str],
        *,
        is_copy: bool,
        states: bool,
    ) -> None:
        self.since = since
        self.until = until
        self.is_copy = is_copy
        self._reader = reader
        self._segments = segments  # to read, oldest first
        self._ids = ids  # of the snapshots that the store has passed, as far as it shows
        self._states = states

    def replace(self, begun: StorePosition) -> bool:
        """Return whether they replace all that changes up to ``begun`` may have written."""
        return self.until.model == begun.model and (self.is_copy or begun.rows in self._ids)

    @property
    def is_empty(self) -> bool:
        """Nothing was committed since."""
        return not self._segments

    def is_gone(self) -> bool:
        """Return whether the store has moved on, and a file of this state was removed."""
        return self._reader.is_gone()

    @property
    def tables(self) -> Mapping[str, StoredTable]:
        """The tables of the store, by name."""
        return self._reader.tables

    @property
    def saved_unix_seconds(self) -> float | None:
        """When the state ``until`` was written to the store; None: its file is gone."""
        try:
            return self._reader.path_of(self._newest()).stat().st_mtime
        except OSError:
            return None

    def _newest(self) -> SegmentRecord:
        points = self._reader.manifest.dense
        return next(r for r in points if r.snapshot == self.until.snapshot)

    def dense_tensors(self) -> dict[str, torch.Tensor]:
        """Read the model's parameters and buffers that are no table, at ``until``.

        Raises:
            DamageError: the dense part is damaged.
        """
        model = read_dense(self._reader, self._newest()).tree()["model"]
        return {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}

    def __iter__(self) -> Iterator[RowBatch]:
        with reader_lease(self._reader.directory):
            number = 0
            for table in sorted(self._reader.tables):
                for chunk in self._changed(table):
                    yield RowBatch(number, table, chunk.row_ids, chunk.arrays, chunk.step)
                    number += 1

    def _changed(self, table: str) -> Iterator[ChunkRows]:
        """Yield the changed rows of one table."""
        rows = self._open(table)
        begin, end = 0, self._reader.table(table).num_embeddings
        for first in range(begin, end, WINDOW_ROWS):
            last = min(first + WINDOW_ROWS, end)
            is_found = np.zeros(last - first, dtype=np.bool_)
            for segment in reversed(rows.segments):
                for chunk in segment.chunks_of(table):
                    held = None
                    if not segment.is_run(chunk) and first == begin and last == end:
                        held = segment.rows(chunk)  # ids and values in one read
                        wanted = _find_rows(held.row_ids, first, last, is_found)
                    else:
                        wanted = _find_chunk(segment, chunk, first, last, is_found)
                    if wanted is not None:
                        yield self._taken(rows, held or segment.rows(chunk), wanted)

    def _taken(self, rows: NewestRows, chunk: ChunkRows, wanted: torch.Tensor | slice) -> ChunkRows:
        """Return the rows of a chunk at positions ``wanted``."""
        row_ids = _chosen(chunk.row_ids, wanted)
        arrays = {}
        for array in rows.arrays:
            if array.name in (WEIGHT, KEY) or self._states:
                held = chunk.arrays.get(array.name)
                arrays[array.name] = (
                    # An optimizer's state that was made after this segment is zero in it.
                    torch.zeros((len(row_ids), *array.row_shape), dtype=array.dtype)
                    if held is None
                    else _chosen(held, wanted)
                )
        return ChunkRows(chunk.step, row_ids, arrays)

    def _open(self, table: str) -> NewestRows:
        reader = self._reader
        ranges = reader.manifest.model.row_ranges
        rows = NewestRows(table, [SegmentRows(segment, ranges) for segment in self._segments])
        stored = reader.table(table)
        held: set[str] = set()
        for segment in rows.segments:
            spec = segment.table(table)
            assert spec is not None
            names = {array.name for array in spec.arrays}
            for array in spec.arrays:
                form = (array.dtype, array.row_shape)
                if array.name == WEIGHT and form != (stored.dtype, (stored.embedding_dim,)):
                    raise DamageError(
                        f"{segment.segment.path}: '{table}' is not as in MANIFEST.json"
                    )
            if self._states and (lost := held - names):
                raise StoreError(
                    f"{segment.segment.path}: '{table}' has no {sorted(lost)}, which an older "
                    "segment has; read weights alone, or after the next base snapshot"
                )
            held |= names
        return rows


def _find_chunk(segment: SegmentRows, chunk: int, first: int, last: int, is_found: Found) -> Wanted:
    """Return positions of the rows of a chunk in [first, last) not found yet; find them."""
    low, high = segment.span(chunk)
    if high <= first or low >= last:
        return None
    if not segment.is_run(chunk):
        return _find_rows(segment.row_ids(chunk), first, last, is_found)
    begin, end = max(low, first), min(high, last)
    found = is_found[begin - first : end - first]
    wanted: Wanted = slice(begin - low, end - low)
    if found.any():
        positions = np.flatnonzero(~found) + (begin - low)
        wanted = torch.from_numpy(positions) if len(positions) else None
    found[:] = True
    return wanted


def _find_rows(row_ids: torch.Tensor, first: int, last: int, is_found: Found) -> Wanted:
    """Return the same of row ids, which ascend."""
    ids = row_ids.numpy()
    begin, end = (int(at) for at in np.searchsorted(ids, (first, last)))
    at = ids[begin:end] - first
    is_new = ~is_found[at]
    is_found[at] = True
    if is_new.all():
        return slice(begin, end) if begin < end else None
    positions = np.flatnonzero(is_new) + begin
    return torch.from_numpy(positions) if len(positions) else None


def _chosen(values: torch.Tensor, wanted: torch.Tensor | slice) -> torch.Tensor:
    return values[wanted] if isinstance(wanted, slice) else values.index_select(0, wanted)


def changed_rows(
    store: str | os.PathLike[str],
    since: StorePosition | None = None,
    *,
    states: bool = False,
    on_gap: OnGap = "raise",
    until: StorePosition | None = None,
) -> ChangedRows:
    """Return the rows that snapshots committed after ``since`` brought, in their newest state.

    A consumer that holds the state of ``since`` and applies every batch holds what ``recover()``
    restores. Rows that did not change may be among them.

    Args:
        store: the directory, which a training process may be using.
        since: the ``until`` of the changes that the consumer applied last; None: yield all rows.
        states: yield per-row optimizer states, too.
        on_gap: where the store does not show what changed, as after a roll-back to before
            ``since``: ``"raise"``, or ``"copy"`` all rows.
        until: the state that the store must be at, as that of another iteration.

    Raises:
        PositionError: ``since`` is not in the store's history, and ``on_gap`` is ``"raise"``; it is
            of another store; or the store is no longer at ``until``.
        StoreError: not a store, or it holds no snapshot.
        DamageError: a header is damaged. While iterating: rows are.
    """
    if on_gap not in ("raise", "copy"):
        raise UsageError(f"on_gap is {on_gap!r}; it must be 'raise' or 'copy'")
    return read_committed(store, lambda reader: _plan(reader, since, until, on_gap, states=states))


def _plan(
    reader: StoreReader,
    since: StorePosition | None,
    until: StorePosition | None,
    on_gap: OnGap,
    *,
    states: bool,
) -> ChangedRows:
    newest = reader.newest()
    model = model_digest(reader)
    if since is not None and since.model != model:
        raise PositionError(
            f"the position is of a store of other tables than '{reader.directory}'; copy all rows "
            "with since=None"
        )
    segments = reader.open_at(newest.snapshot)
    records = reader.manifest.at(newest.snapshot)
    ids = [record.id for record in records]
    first = None if since is None else _find(ids, since.rows)
    here = StorePosition(
        *(model, newest.snapshot, newest.last_step, newest.num_samples),
        rows=ids[-1] if ids else "",
    )
    is_gap = first is None and since is not None and not _begins_after(since, records)
    if is_gap and on_gap == "raise":
        assert since is not None
        raise PositionError(
            f"'{reader.directory}' no longer shows what changed after snapshot {since.snapshot} "
            f"(step {since.step}): it was rolled back or repaired. "
            'Copy all rows with on_gap="copy"'
        )
    if until is not None and until != here:
        raise PositionError(
            f"'{reader.directory}' is at snapshot {newest.snapshot}, no longer at that of until="
        )
    return ChangedRows(
        *(reader, since, here, segments[first or 0 :], ids),
        is_copy=bool(segments) and not first,
        states=states,
    )


def _begins_after(since: StorePosition, records: Sequence[SegmentRecord]) -> bool:
    """Return whether rows begin with a base snapshot that is newer than a position."""
    return bool(records) and records[0].snapshot > since.snapshot


def _find(ids: Sequence[str], wanted: str) -> int | None:
    """Return where the changes after a snapshot begin in live segments; None: it is not known."""
    if not ids:
        return 0 if wanted == "" else None
    return ids.index(wanted) + 1 if wanted in ids else None
