"""Plan what the tables of a live model take from other stores, however those cut their tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from cpr_ext.recovery.import_store import (
    BLOCK_BYTES,
    PartCopy,
    StoreAt,
    import_rows,
    open_at,
    part_of,
    stored_arrays,
)
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.state.slot_keys import EMPTY, KEY, is_key_array
from cpr_ext.state.table import WEIGHT, Table
from cpr_ext.state.table_part import TablePart
from cpr_ext.state.wrapper_names import match_names
from cpr_ext.storage.manifest import StoredTable
from cpr_ext.storage.segment_format import ArraySpec
from cpr_ext.storage.store_reader import NewestRows, StoreReader

NO_ROOM = (
    "'{name}' has slots for {room} of the {count} ids that belong to it: those with the lowest "
    "{score} are left out"
)


@dataclass(frozen=True)
class KeyedCopy(PartCopy):
    """What a live table takes of another process's slots, by their keys.

    Attributes:
        slots: (held rows,) int64, the live slot of each stored one; -1: none.
    """

    slots: torch.Tensor = field(kw_only=True)

    @property
    def stored_rows(self) -> tuple[int, int]:
        """See :class:`PartCopy`: all of them may have an id of this process."""
        return 0, self.held.shape[0]

    def takes(self, row_ids: torch.Tensor) -> torch.Tensor:
        """See :class:`PartCopy`."""
        return self.slots[row_ids] >= 0

    def put(self, array: str, row_ids: torch.Tensor, values: torch.Tensor) -> None:
        """See :class:`PartCopy`."""
        live = self.table.arrays()[array]
        live[self.slots[row_ids].to(live.device)] = values.to(live.device)


def give_slots(
    stores: Sequence[StoreAt], copies: Sequence[Mapping[str, Sequence[PartCopy]]]
) -> list[str]:
    """Give the ids of this process its slots, in all :class:`KeyedCopy`.

    Returns:
        A sentence for each table that has too few.

    Raises:
        DamageError: a row of one of the tables is damaged.
    """
    parts: dict[int, list[tuple[KeyedCopy, dict[str, torch.Tensor]]]] = {}
    for store, of_store in zip(stores, copies, strict=True):
        for name, of_table in of_store.items():
            for copy in of_table:
                if isinstance(copy, KeyedCopy):
                    of_live = parts.setdefault(id(copy.table), [])
                    of_live.append((copy, _keys_of(store, name, copy.held.shape[0])))
    return [text for of_live in parts.values() for text in _give(of_live)]


def _give(parts: Sequence[tuple[KeyedCopy, Mapping[str, torch.Tensor]]]) -> list[str]:
    table = parts[0][0].table
    assert table.slots is not None
    share, reserved = table.slots.share, table.slots.num_reserved
    assert share is not None
    key = torch.cat([arrays[KEY] for _, arrays in parts])
    own = torch.nonzero((key != EMPTY) & share.owns(key)).flatten()
    room, count, found = table.num_embeddings - reserved, len(own), []
    if count > room:
        name = min(parts[0][1].keys() - {KEY}, default=KEY)
        score = torch.cat([arrays[name] for _, arrays in parts])[own]
        own = own[torch.argsort(score, descending=True, stable=True)[:room]].sort().values
        text = NO_ROOM.format(name=table.name, room=room, count=count, score=name)
        found.append(text)
    slots = torch.full_like(key, EMPTY)
    slots[own] = torch.arange(len(own))
    alike = share.index * len(parts) // share.count  # the part whose last rows are for no id
    sizes = [len(arrays[KEY]) for _, arrays in parts]
    for number, of_part in enumerate(torch.split(slots, sizes)):
        if number == alike and reserved:
            of_part[-reserved:] = torch.arange(room, table.num_embeddings)
        parts[number][0].slots.copy_(of_part)
    return found


def _keys_of(store: StoreAt, name: str, num_rows: int) -> dict[str, torch.Tensor]:
    """Return keys and scores of a stored table, (num_rows, ...) each."""
    found: dict[str, torch.Tensor] = {KEY: torch.full((num_rows,), EMPTY)}
    usable = open_at(store, RecoveryReport(), direct_io=False).usable
    rows = NewestRows(name, [each.rows for each in usable])
    step = max(1, BLOCK_BYTES // max(1, sum(array.row_bytes for array in rows.arrays)))
    for at in range(0, num_rows, step):
        block = rows.range(at, min(at + step, num_rows))
        is_held = block.steps >= 0
        for array, values in block.arrays.items():
            if is_key_array(array):
                empty = torch.zeros((num_rows, *values.shape[1:]), dtype=values.dtype)
                column = found.setdefault(array, empty)
                column[block.row_ids[is_held]] = values[is_held]
    return found


OTHER_SLOTS = (
    "'{held}' has keys, and '{wanted}' of the model other slots: which process holds a key depends "
    "on how many there are, in a way that is not known. Recover with the plan and the processes "
    "that the stores were made with"
)
_Live = Sequence[tuple[Table, TablePart]]


class CopyPlan:
    """What the tables of a live model take from which store.

    Args:
        stores: one, or those of all processes of a job in any order.
        tables: of the live model, each a part of a table or a whole one.
        by_name: match the tables of one store by their own names. Else each table takes whatever
            part of it any store holds.
        in_dense: whole arrays of tables that the stores hold as dense parameters, by live table.
        weights_only: the live tables take no optimizer state, and lack none.

    Attributes:
        differences: where the stores do not hold what the tables need, one sentence each.
        is_rekeyed: a table takes rows by their keys, as the stores are of another number of
            processes.
    """

    def __init__(
        self,
        stores: Sequence[StoreAt],
        tables: Sequence[Table],
        *,
        by_name: bool,
        in_dense: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
        weights_only: bool = False,
    ) -> None:
        self._stores = stores
        live = [(table, part_of(table, as_whole=by_name)) for table in tables]
        stored = [table for store in stores for table in store.reader.tables.values()]
        stored_names = {part_of(table, as_whole=by_name).table for table in stored}
        names = match_names(stored_names, {part.table for _, part in live})
        found: dict[str, None] = {}  # a set that keeps its order
        cuts = {part_of(t, as_whole=by_name).rows for t in stored if t.keys}
        rekeyed = [
            table
            for table, part in live
            if not by_name
            and table.slots is not None
            and table.slots.share is not None
            and (table.slots.share.count != len(stores) or part.rows not in cuts)
        ]
        self._copies = [
            _copies_from(s.reader, live, names, by_name, rekeyed, found) for s in stores
        ]
        self._rekeyed = [table for table in rekeyed if self._copies_to(table, of_dense=False)]
        self.is_rekeyed = bool(self._rekeyed)
        found.update(dict.fromkeys(give_slots(stores, self._copies)))
        joined: dict[tuple[str, str], torch.Tensor] = {}
        for store, copies in zip(stores, self._copies, strict=True):
            for name, all_arrays in stored_arrays(store).items():
                arrays = {
                    n: a
                    for n, a in all_arrays.items()
                    if not weights_only or n == WEIGHT or is_key_array(n)
                }
                for copy in copies.get(name, ()):
                    found.update(dict.fromkeys(_array_differences(arrays, copy, by_name)))
                    joined.update(_joined_states(arrays, copy))
        self._joined = list(joined.values())
        self._of_dense = [
            (copy, arrays)
            for name, arrays in (in_dense or {}).items()
            for copy in _copies_of_dense(name, arrays, live, found)
        ]
        if by_name:
            absent = [(name, "model") for name in sorted(stored_names - names.keys())]
            absent += [(t.name, "store") for t in tables if t.name not in names.values()]
            found.update({f"table '{name}' is not in the {where}": None for name, where in absent})
        else:
            for table, part in live:
                is_whole = any(table is other for other in self._rekeyed)
                needed = replace(part, rows=(0, part.num_embeddings)) if is_whole else part
                found.update(dict.fromkeys(_gaps(needed, self._copies_to(table))))
        self.differences = list(found)

    @property
    def is_empty(self) -> bool:
        """Whether no table takes anything."""
        return not any(self._copies) and not self._of_dense

    def copy(self, findings: RecoveryReport, *, direct_io: bool) -> None:
        """Copy the rows; counts are added to the findings, a row of two parts is counted twice."""
        for state in self._joined:
            state.zero_()
        for table in self._rekeyed:
            for name, array in table.key_arrays().items():
                array.fill_(EMPTY if name == KEY else 0)
        for store, copies in zip(self._stores, self._copies, strict=True):
            import_rows(store, copies, findings, direct_io=direct_io)
        for copy, arrays in self._of_dense:
            findings.rows_restored += copy.put_all(arrays)

    def _copies_to(self, table: Table, *, of_dense: bool = True) -> list[PartCopy]:
        of_stores = (copies for of_store in self._copies for copies in of_store.values())
        copies = [copy for copies in of_stores for copy in copies]
        copies += [copy for copy, _ in self._of_dense] if of_dense else []
        return [copy for copy in copies if copy.table is table]


def _copies_from(
    reader: StoreReader,
    live: _Live,
    names: Mapping[str, str],
    by_name: bool,
    rekeyed: Sequence[Table],
    found: dict[str, None],
) -> dict[str, list[PartCopy]]:
    """Return what live tables take from each stored table; add differences to ``found``."""
    copies: dict[str, list[PartCopy]] = {}
    for stored in reader.tables.values():
        part = part_of(stored, as_whole=by_name)
        held = replace(part, table=names.get(part.table, part.table))
        if overlaps := list(_overlaps(stored, held, live, found, rekeyed)):
            copies[stored.name] = overlaps
    return copies


def _copies_of_dense(
    name: str, arrays: Mapping[str, torch.Tensor], live: _Live, found: dict[str, None]
) -> list[PartCopy]:
    """Return what live tables take from whole arrays; add differences to ``found``."""
    num_rows, dim = arrays[WEIGHT].shape
    held = TablePart(name, (0, num_rows), (0, dim), num_rows, dim)
    stored = StoredTable(name, num_rows, dim, arrays[WEIGHT].dtype)
    copies = list(_overlaps(stored, held, live, found))
    specs = {n: ArraySpec(n, a.dtype, tuple(a.shape[1:])) for n, a in arrays.items()}
    for copy in copies:
        found.update(dict.fromkeys(_array_differences(specs, copy, by_name=False)))
    return copies


def _overlaps(
    stored: StoredTable,
    held: TablePart,
    live: _Live,
    found: dict[str, None],
    rekeyed: Sequence[Table] = (),
) -> Iterator[PartCopy]:
    """Return the same of one stored table; a live one that has grown takes its old rows."""
    for table, wanted in live:
        by_key = bool(stored.keys) and any(table is other for other in rekeyed)
        common = held if by_key and held.table == wanted.table else held.overlap(wanted)
        if common is None:
            continue
        pairs = {
            "num_embeddings": (held.num_embeddings, wanted.num_embeddings),
            "embedding_dim": (held.embedding_dim, wanted.embedding_dim),
            "dtype": (stored.dtype, table.weight.dtype),
            "keys": (list(stored.keys), sorted(table.key_arrays())),
        }
        differing = {what for what, (old, new) in pairs.items() if old != new}
        for what in sorted(differing):
            old, new = pairs[what]
            found[f"table '{held.table}' has {what} {old}, the model {new}"] = None
        is_cut_alike = (held.rows, held.columns) == (wanted.rows, wanted.columns)
        if by_key:
            if not differing:
                slots = torch.full((held.shape[0],), EMPTY)
                yield KeyedCopy(table, held, wanted, common, slots=slots)
            continue
        if stored.keys and "num_embeddings" not in differing and not is_cut_alike:
            found[OTHER_SLOTS.format(held=held.name, wanted=wanted.name)] = None
            continue
        has_grown = held.num_embeddings < wanted.num_embeddings
        if not differing or (has_grown and differing == {"num_embeddings"}):
            yield PartCopy(table, held, wanted, common)


def _array_differences(
    arrays: Mapping[str, ArraySpec], copy: PartCopy, by_name: bool
) -> Iterator[str]:
    for array in arrays.values():
        if (misfit := copy.misfit(array)) is not None:
            yield misfit
        elif array.row_shape == () and not copy.has_same_columns:
            yield (
                f"'{copy.wanted.table}/{array.name}' has one value for the columns "
                f"{copy.held.columns} of a row, the model for {copy.wanted.columns}"
            )
    if not by_name:
        for name in copy.table.arrays().keys() - arrays.keys():
            yield f"'{copy.wanted.table}/{name}' is not in the store"


def _joined_states(
    arrays: Mapping[str, ArraySpec], copy: PartCopy
) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """States of one value per row that a live table sums up from several parts."""
    live = copy.table.arrays() if copy.share < 1 else {}
    for name, array in arrays.items():
        if array.row_shape == () and name in live and copy.misfit(array) is None:
            yield (copy.table.name, name), live[name]


def _gaps(part: TablePart, copies: Sequence[PartCopy]) -> Iterator[str]:
    """Yield what of a part no store holds, or two stores hold."""
    for index, copy in enumerate(copies):
        if any(copy.common.overlap(other.common) for other in copies[:index]):
            yield f"{copy.common.name} is in two of the stores"
            return
    covered = sum(copy.common.shape[0] * copy.common.shape[1] for copy in copies)
    if covered < part.shape[0] * part.shape[1]:
        yield f"{part.name} is not, or not as a whole, in the stores"
