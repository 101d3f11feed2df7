"""Rows of keyed tables for another number of processes: each goes to the one that has its id now.

The number of processes says which of them an id belongs to, and each gives it a slot of its own.
So the keys of all stores are read first. The ids of this process get its slots in the order in
which they are found. Where it has too few, those with the lowest score stay without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cpr_ext.recovery.findings import Findings
from cpr_ext.recovery.import_store import BLOCK_BYTES, StoreAt, open_at
from cpr_ext.recovery.part_copy import PartCopy
from cpr_ext.state.slot_keys import EMPTY, KEY, is_key_array
from cpr_ext.storage.newest_rows import NewestRows

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
    reader = store.reader
    found: dict[str, torch.Tensor] = {KEY: torch.full((num_rows,), EMPTY)}
    for shard in range(reader.num_shards):
        begin, end = reader.row_range(name, shard)
        usable = open_at(store, shard, Findings(), direct_io=False).usable
        rows = NewestRows(name, [each.rows for each in usable])
        step = max(1, BLOCK_BYTES // max(1, sum(array.row_bytes for array in rows.arrays)))
        for at in range(begin, end, step):
            block = rows.range(at, min(at + step, end))
            is_held = block.not_after >= 0
            for array, values in block.arrays.items():
                if is_key_array(array):
                    empty = torch.zeros((num_rows, *values.shape[1:]), dtype=values.dtype)
                    column = found.setdefault(array, empty)
                    column[block.row_ids[is_held]] = values[is_held]
    return found
