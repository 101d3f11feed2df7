"""Tables laid together from the parts that the stores of a job hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from cpr_ext.errors import StoreError
from cpr_ext.recovery.import_store import part_of
from cpr_ext.state.table_part import TablePart
from cpr_ext.state.table_plans import describe_table, plan_faults
from cpr_ext.storage.manifest import SegmentRecord, StoredTable
from cpr_ext.storage.segment_format import ArraySpec
from cpr_ext.storage.store_reader import NewestRows, StoreReader
from cpr_ext.wings.tools.maintenance.row_reading import rows_of

BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Member:
    """One of the stores of a job, at one of its snapshots.

    Attributes:
        worker: what messages call it: its rank, or the name of its store.
        record: the snapshot.
    """

    worker: int | str
    reader: StoreReader
    record: SegmentRecord


@dataclass(frozen=True)
class Holding:
    """A part of a table, and the store that has it under ``name``."""

    member: int
    name: str
    part: TablePart
    dtype: torch.dtype


@dataclass(frozen=True)
class TablePlan:
    """What the stores of a job hold of its tables.

    Attributes:
        tables: the parts of each table, by the whole table's name.
        unplaced: tables that several stores hold under one name, none saying which part it has,
            and how many do.
        faults: why the parts do not make up whole tables, one sentence each.
    """

    tables: Mapping[str, Sequence[Holding]]
    unplaced: Mapping[str, int]
    faults: Sequence[str]


def plan_tables(
    stores: Sequence[Mapping[str, StoredTable]],
    workers: Sequence[int | str],
    *,
    rows_in_order: bool = False,
) -> TablePlan:
    """Find what the stores of a job hold together.

    Args:
        stores: the tables of each, by name.
        workers: what to call them.
        rows_in_order: the rows of a table that several stores hold under one name, without saying
            which part, follow each other as the stores do.
    """
    plans = [
        {name: describe_table(t.embedding_dim, t.dtype, t.part) for name, t in tables.items()}
        for tables in stores
    ]
    of_name: dict[str, list[int]] = {}
    for number, tables in enumerate(stores):
        for name, table in tables.items():
            if table.part is None:
                of_name.setdefault(name, []).append(number)
    found: dict[str, list[Holding]] = {}
    for number, tables in enumerate(stores):
        for name, table in tables.items():
            if len(of_name.get(name, ())) > 1:
                continue
            part = part_of(table)
            found.setdefault(part.table, []).append(Holding(number, name, part, table.dtype))
    several = {name: numbers for name, numbers in of_name.items() if len(numbers) > 1}
    faults = plan_faults(plans, workers)
    cut = {t.part.table for tables in stores for t in tables.values() if t.part is not None}
    faults += [
        f"table '{name}' is a whole one in a store, and in parts in others"
        for name in sorted(cut & of_name.keys())
    ]
    if rows_in_order:
        found |= {name: _in_order(name, stores, numbers) for name, numbers in several.items()}
        several = {}
    return TablePlan(found, {name: len(numbers) for name, numbers in several.items()}, faults)


def plan_of_one(reader: StoreReader) -> TablePlan:
    """Return the tables of one store alone, though they may be parts of larger ones."""
    found = {}
    for name, table in reader.tables.items():
        rows, dim = table.num_embeddings, table.embedding_dim
        part = TablePart(name, (0, rows), (0, dim), rows, dim)
        found[name] = [Holding(0, name, part, table.dtype)]
    return TablePlan(found, {}, [])


def _in_order(
    name: str, stores: Sequence[Mapping[str, StoredTable]], numbers: Sequence[int]
) -> list[Holding]:
    tables = [stores[number][name] for number in numbers]
    num_rows, begin, holdings = sum(t.num_embeddings for t in tables), 0, []
    for number, table in zip(numbers, tables, strict=True):
        end, dim = begin + table.num_embeddings, table.embedding_dim
        part = TablePart(name, (begin, end), (0, dim), num_rows, dim)
        holdings.append(Holding(number, name, part, table.dtype))
        begin = end
    return holdings


@dataclass(frozen=True)
class _StoredPart:
    """A part of a table, and its rows, as the store counts."""

    part: TablePart
    rows: NewestRows

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        return self.rows.arrays

    def blocks(self, array: ArraySpec, first: int, last: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (row, values) of the whole table's rows [first, last) that it holds."""
        shift, end = self.part.rows
        low, high = max(0, first - shift), min(end, last) - shift
        if low < high:
            arrays = self.rows.range(low, high).arrays
            # A state that no segment has is zero, as in older segments.
            zeros = torch.zeros((high - low, *array.row_shape), dtype=array.dtype)
            yield low + shift, arrays.get(array.name, zeros)


@dataclass(frozen=True)
class WholeArray:
    """One array of a table, wherever its parts are; read on demand.

    Attributes:
        name: ``weight``, or that of a per-row state. Of a state that has one value for all columns
            of a part, where columns are cut, ``sum[0:8]``: it is that of these columns.
        shape: (rows, ...) of the whole.
        lacking: workers whose stores have no such state; it is zero there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    lacking: tuple[int | str, ...]
    sources: tuple[tuple[_StoredPart, ArraySpec], ...]
    is_cut_by_columns: bool

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield its rows in order, some MB at a time.

        Raises:
            DamageError: a chunk that holds one of them is damaged.
        """
        row_bytes = max(sum(a.row_bytes for a in piece.arrays) for piece, _ in self.sources)
        step = max(1, BLOCK_BYTES // row_bytes)
        for first in range(0, self.shape[0], step):
            last = min(first + step, self.shape[0])
            block = torch.zeros((last - first, *self.shape[1:]), dtype=self.dtype)
            for piece, array in self.sources:
                for row, values in piece.blocks(array, first, last):
                    target = block[row - first : row - first + len(values)]
                    if self.is_cut_by_columns:
                        target = target[:, slice(*piece.part.columns)]
                    target.copy_(values)
            yield block

    def whole(self) -> torch.Tensor:
        """Return all of it."""
        return torch.cat(list(self.blocks()))


def whole_arrays(members: Sequence[Member], holdings: Sequence[Holding]) -> list[WholeArray]:
    """Return the arrays of one table, from parts that make it up.

    Raises:
        StoreError: the parts' arrays are not of one type or shape.
        DamageError: a header that would have to be read is damaged.
    """
    pieces = [_stored_part(members[holding.member], holding) for holding in holdings]
    workers = [members[holding.member].worker for holding in holdings]
    columns = {piece.part.columns for piece in pieces}
    found = []
    for name in dict.fromkeys(array.name for piece in pieces for array in piece.arrays):
        specs = [next((a for a in piece.arrays if a.name == name), None) for piece in pieces]
        by_columns = len(columns) > 1 and all(
            spec is None or spec.row_shape == piece.part.shape[1:]
            for spec, piece in zip(specs, pieces, strict=True)
        )
        groups = [None] if by_columns or len(columns) == 1 else sorted(columns)
        for group in groups:
            chosen = [
                (piece, spec, worker)
                for piece, spec, worker in zip(pieces, specs, workers, strict=True)
                if group in (None, piece.part.columns)
            ]
            if any(spec is not None for _, spec, _ in chosen):
                label = name if group is None else f"{name}[{group[0]}:{group[1]}]"
                found.append(_whole_array(label, chosen, by_columns=by_columns))
    return found


def _whole_array(
    name: str,
    chosen: Sequence[tuple[_StoredPart, ArraySpec | None, int | str]],
    *,
    by_columns: bool,
) -> WholeArray:
    known = [spec for _, spec, _ in chosen if spec is not None]
    part, first = chosen[0][0].part, known[0]
    kinds = {(spec.dtype, () if by_columns else spec.row_shape) for spec in known}
    if len(kinds) > 1:
        raise StoreError(f"'{part.table}/{name}' has rows of several kinds in the stores: {kinds}")
    row_shape = (part.embedding_dim,) if by_columns else first.row_shape
    sources = []
    for piece, spec, _ in chosen:
        own_shape = piece.part.shape[1:] if by_columns else first.row_shape
        sources.append((piece, spec or ArraySpec(first.name, first.dtype, own_shape)))
    return WholeArray(
        name,
        (part.num_embeddings, *row_shape),
        first.dtype,
        tuple(dict.fromkeys(worker for _, spec, worker in chosen if spec is None)),
        tuple(sources),
        by_columns,
    )


def _stored_part(member: Member, holding: Holding) -> _StoredPart:
    rows = rows_of(member.reader, holding.name, member.record.snapshot)
    return _StoredPart(holding.part, rows)
