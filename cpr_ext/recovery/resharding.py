"""Take tables from the stores of several processes, each with a part, cut as a live model's are.

A part is a range of rows and columns. Weights, and state of the weight's shape, are cut and joined
bit for bit. State of one value per row belongs to all columns of the part. Where the columns are
split differently, no value has its bits. It then becomes the mean over the columns, which is what
row-wise Adagrad would have accumulated for the whole row; that is a difference, which ``strict``
refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from cpr_ext.errors import StoreError
from cpr_ext.recovery.import_store import newest_undamaged, stored_arrays, transplant_rows
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.recovery.restore import read_dense
from cpr_ext.state.dense_state import DensePart
from cpr_ext.state.table import Table
from cpr_ext.state.table_part import TablePart
from cpr_ext.state.wrapper_names import match_names
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.segment_format import ArraySpec
from cpr_ext.storage.store_reader import StoredTable, StoreReader


@dataclass(frozen=True)
class StoreAt:
    """A store, and the number of the snapshot to take from it."""

    reader: StoreReader
    snapshot: int


def newest_of_all(
    readers: Sequence[StoreReader], *, full: bool, report: RecoveryReport
) -> tuple[list[StoreAt], DensePart]:
    """Of each store the newest snapshot, and of these the newest dense part.

    Args:
        full: the newest step at which every store has a full-recovery point.

    Raises:
        StoreError: a store holds no snapshot, or there is no such step.
        DamageError: no undamaged dense part is left in a store.
    """
    if full:
        records = newest_records(readers, full=True)
        stores = [StoreAt(r, at.snapshot) for r, at in zip(readers, records, strict=True)]
        return stores, read_dense(readers[0].dense, records[0])
    found = [newest_undamaged(reader, full=False, report=report) for reader in readers]
    stores = [StoreAt(r, record.snapshot) for r, (record, _) in zip(readers, found, strict=True)]
    _, part = max(found, key=lambda item: item[0].last_step)
    return stores, part


def newest_records(readers: Sequence[StoreReader], *, full: bool) -> list[SegmentRecord]:
    """Of each store its newest snapshot; ``full``: the newest full-recovery point of one step.

    Raises:
        StoreError: a store holds no such snapshot, or there is no such step.
    """
    newest = [reader.newest(full=full) for reader in readers]
    if not full:
        return newest
    points = [
        {r.last_step: r for r in reader.dense.segments if r.is_complete} for reader in readers
    ]
    steps = set.intersection(*(set(of_store) for of_store in points))
    if not steps:
        names = ", ".join(f"'{reader.directory}'" for reader in readers)
        raise StoreError(f"{names}: no step at which every one of them has a full-recovery point")
    return [of_store[max(steps)] for of_store in points]


@dataclass(frozen=True)
class _Piece:
    """What a live table takes from one stored table.

    Attributes:
        common: the part that both hold.
        held, wanted: the parts that the store and the live table hold.
    """

    table: Table
    held: TablePart
    wanted: TablePart
    common: TablePart

    @property
    def stored_rows(self) -> tuple[int, int]:
        """The rows [begin, end) to take, as the store numbers them."""
        begin, end = self.common.rows
        return begin - self.held.rows[0], end - self.held.rows[0]

    @property
    def stored_columns(self) -> slice:
        begin, end = self.common.columns
        return slice(begin - self.held.columns[0], end - self.held.columns[0])

    @property
    def live_columns(self) -> slice:
        begin, end = self.common.columns
        return slice(begin - self.wanted.columns[0], end - self.wanted.columns[0])

    @property
    def is_per_row(self) -> bool:
        """A value per row can be taken as it is: the columns are cut alike."""
        return self.held.columns == self.wanted.columns

    @property
    def share(self) -> float:
        """Which share of the live table's columns it brings."""
        return self.common.shape[1] / self.wanted.shape[1]

    def wanted_row_shape(self, array: ArraySpec) -> tuple[int, ...] | None:
        """The shape of a live row of such an array; None if its rows cannot be cut."""
        shapes = {(): (), (self.held.shape[1],): (self.wanted.shape[1],)}
        return shapes.get(array.row_shape)

    def put(self, array: str, row_ids: torch.Tensor, values: torch.Tensor) -> None:
        begin, end = self.stored_rows
        mine = (row_ids >= begin) & (row_ids < end)
        rows, values = row_ids[mine] + (self.held.rows[0] - self.wanted.rows[0]), values[mine]
        live = self.table.arrays()[array]
        rows, values = rows.to(live.device), values.to(live.device)
        if live.dim() == 2:
            live[rows, self.live_columns] = values[:, self.stored_columns]
        elif self.share == 1:
            live[rows] = values
        else:
            live[rows] += self.share * values


class _PartTarget:
    """The live tables that take rows of one stored table; a transplant's ``Target``."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self._pieces = pieces

    @property
    def rows(self) -> tuple[int, int]:
        spans = [piece.stored_rows for piece in self._pieces]
        return min(begin for begin, _ in spans), max(end for _, end in spans)

    def takes(self, array: ArraySpec, skipped: dict[str, None]) -> bool:
        if any(_misfit(array, piece) is not None for piece in self._pieces):
            return False
        for piece in self._pieces:
            row_shape = piece.wanted_row_shape(array)
            if array.name not in piece.table.arrays() and row_shape is not None:
                piece.table.make_row_state(array.name, row_shape, array.dtype)
        return True

    def put(self, array: str, row_ids: torch.Tensor, values: torch.Tensor) -> None:
        for piece in self._pieces:
            piece.put(array, row_ids, values)


class PartsPlan:
    """What the tables of a live model take from which store.

    Args:
        stores: of all processes, in any order.
        tables: of the live model, each a part of a table or a whole one.

    Attributes:
        differences: where the stores do not hold what the tables need, one sentence each.
    """

    def __init__(self, stores: Sequence[StoreAt], tables: Sequence[Table]) -> None:
        self._pieces: list[dict[str, list[_Piece]]] = []
        self.differences: list[str] = []
        live = [(table, part_of(table.name, table.weight.shape, table.part)) for table in tables]
        of_table: dict[str, list[_Piece]] = {table.name: [] for table in tables}
        found: dict[str, None] = {}
        joined: dict[tuple[str, str], torch.Tensor] = {}
        held = {part_of_stored(t).table for s in stores for t in s.reader.tables.values()}
        names = match_names(held, {part.table for _, part in live})
        for store in stores:
            pieces: dict[str, list[_Piece]] = {}
            for stored in store.reader.tables.values():
                for piece in _pieces(stored, live, names, found):
                    pieces.setdefault(stored.name, []).append(piece)
                    of_table[piece.table.name].append(piece)
            self._pieces.append(pieces)
            for name, arrays in stored_arrays(store.reader, store.snapshot).items():
                for piece in pieces.get(name, ()):
                    found.update(dict.fromkeys(_array_differences(arrays, piece)))
                    if piece.share < 1:
                        joined.update(_per_row_states(arrays, piece))
        self._stores = stores
        self._joined = list(joined.values())
        for table, part in live:
            found.update(dict.fromkeys(_gaps(part, of_table[table.name])))
        self.differences = list(found)

    @property
    def is_empty(self) -> bool:
        """Whether no table takes anything."""
        return not any(self._pieces)

    def copy(self, report: RecoveryReport, *, direct_io: bool) -> None:
        """Copy the rows; counts are added to the report, a row of two parts is counted twice."""
        for state in self._joined:
            state.zero_()
        for store, pieces in zip(self._stores, self._pieces, strict=True):
            targets = {name: _PartTarget(of_table) for name, of_table in pieces.items()}
            ranges = {name: target.rows for name, target in targets.items()}
            transplant_rows(
                store.reader, store.snapshot, targets, ranges, report, direct_io=direct_io
            )


def part_of(name: str, shape: Sequence[int], part: TablePart | None) -> TablePart:
    """The part that a table is; without one it is a whole table."""
    num_rows, dim = shape
    return part or TablePart(name, (0, num_rows), (0, dim), num_rows, dim)


def part_of_stored(stored: StoredTable) -> TablePart:
    """The same of a table of a store."""
    return part_of(stored.name, (stored.num_embeddings, stored.embedding_dim), stored.part)


def _pieces(
    stored: StoredTable,
    live: Sequence[tuple[Table, TablePart]],
    names: Mapping[str, str],
    found: dict[str, None],
) -> Iterator[_Piece]:
    held = part_of_stored(stored)
    held = replace(held, table=names.get(held.table, held.table))
    for table, wanted in live:
        common = held.overlap(wanted)
        if common is None:
            continue
        was = (held.num_embeddings, held.embedding_dim, stored.dtype)
        now = (wanted.num_embeddings, wanted.embedding_dim, table.weight.dtype)
        if was != now:
            found[f"table '{held.table}' is {was} in a store, {now} in the model"] = None
        else:
            yield _Piece(table, held, wanted, common)


def _misfit(array: ArraySpec, piece: _Piece) -> str | None:
    """Why an array of a store has no place in the live table; None if it has one."""
    live = piece.table.arrays().get(array.name)
    what = f"'{piece.wanted.table}/{array.name}'"
    wanted = piece.wanted_row_shape(array)
    if live is None and piece.table.optimizer is None:
        return f"{what} is not in the model"
    if live is None and wanted is not None:
        return None  # the optimizer has not made it yet
    if live is None:
        return f"{what} has rows of shape {array.row_shape}, which cannot be cut"
    if wanted == tuple(live.shape[1:]) and array.dtype == live.dtype:
        return None
    return (
        f"{what} has dtype {array.dtype} and rows of shape {array.row_shape}, the model "
        f"{live.dtype} and {tuple(live.shape[1:])}"
    )


def _per_row_states(
    arrays: dict[str, ArraySpec], piece: _Piece
) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """States of one value per row that a live table has summed up from several parts."""
    live = piece.table.arrays()
    for name, array in arrays.items():
        if array.row_shape == () and name in live and _misfit(array, piece) is None:
            yield (piece.table.name, name), live[name]


def _array_differences(arrays: dict[str, ArraySpec], piece: _Piece) -> Iterator[str]:
    for array in arrays.values():
        misfit = _misfit(array, piece)
        if misfit is not None:
            yield misfit
        elif array.row_shape == () and not piece.is_per_row:
            yield (
                f"'{piece.wanted.table}/{array.name}' has one value for the columns "
                f"{piece.held.columns} of a row, the model for {piece.wanted.columns}"
            )
    for name in piece.table.arrays().keys() - arrays.keys():
        yield f"'{piece.wanted.table}/{name}' is not in the store"


def _gaps(part: TablePart, pieces: Sequence[_Piece]) -> Iterator[str]:
    """What of a part no store holds, or two stores hold."""
    for index, piece in enumerate(pieces):
        if any(piece.common.overlap(other.common) for other in pieces[:index]):
            yield f"{piece.common.name} is in two of the stores"
            return
    covered = sum(piece.common.shape[0] * piece.common.shape[1] for piece in pieces)
    if covered < part.shape[0] * part.shape[1]:
        yield f"{part.name} is not, or not as a whole, in the stores"
