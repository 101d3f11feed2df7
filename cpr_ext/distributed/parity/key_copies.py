"""Copies of the keys of keyed tables, which parity protects in place of the keys themselves.

A map changes its keys and scores at any time, and reports nothing. The copies change at the end of
a step only, in the slots that differ then. So they can be kept before they change, as rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cpr_ext.state.slot_keys import require_same_form
from cpr_ext.state.table import Table

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class KeyCopies:
    """Keys and scores as of the newest completed step, table by table.

    Args:
        tables: those that are not keyed are left out.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = [table for table in tables if table.slots is not None]
        self._copies = [
            {name: array.clone() for name, array in sorted(table.key_arrays().items())}
            for table in self._tables
        ]
        self._versions: list[object] = [None for _ in self._tables]

    @property
    def arrays(self) -> list[list[torch.Tensor]]:
        """The copies of each table, (num_embeddings, ...) each."""
        return [list(copies.values()) for copies in self._copies]

    @property
    def names(self) -> list[str]:
        """What each table's copies are, for messages."""
        return [f"the keys of table '{table.name}'" for table in self._tables]

    def take(self, note: Callable[[int, torch.Tensor], None] = lambda number, slots: None) -> None:
        """Copy what differs.

        Args:
            note: called before the slots (n,) of the table at a position are copied.

        Raises:
            UsageError: a map is wrong, or has other scores than before.
        """
        for number, (table, copies) in enumerate(zip(self._tables, self._copies, strict=True)):
            assert table.slots is not None
            version = table.slots.version()
            if version is not None and version == self._versions[number]:
                continue
            table.slots.refresh()
            arrays = table.key_arrays()
            require_same_form(table.name, arrays, copies)
            slots = _differing(arrays, copies)
            if len(slots):
                note(number, slots)
                for name, copy in copies.items():
                    copy[slots] = arrays[name].detach()[slots]
            self._versions[number] = version

    def give_back(self) -> None:
        """Put keys and scores back to the copies, and have the maps built again."""
        for number, (table, copies) in enumerate(zip(self._tables, self._copies, strict=True)):
            assert table.slots is not None
            for name, array in table.slots.arrays().items():
                array.detach().copy_(copies[name])
            table.slots.rebuild()
            self._versions[number] = table.slots.version()


def _differing(arrays: dict[str, torch.Tensor], copies: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return (n,) the slots that differ in any bit, ascending."""
    found = [
        torch.nonzero((now != then).reshape(len(now), -1).any(1)).flatten()
        for name, copy in copies.items()
        for now, then in [(_bits(arrays[name]), _bits(copy))]
        if not torch.equal(now, then)
    ]
    if not found:
        return torch.empty(0, dtype=torch.int64)
    return found[0] if len(found) == 1 else torch.cat(found).unique()  # type: ignore[no-untyped-call]


def _bits(array: torch.Tensor) -> torch.Tensor:
    return array.detach().view(_INTEGERS.get(array.element_size(), torch.int64))
