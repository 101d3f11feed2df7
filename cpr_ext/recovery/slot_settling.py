"""After the rows of keyed tables are restored: no slot keeps a row under another id.

A snapshot with keyed tables is of one step, and saves every slot whose key changed. So restored
keys are those of one step, unless damage made rows older, or only some shards were lost. Of slots
with one key then the newest keeps it, and the others are emptied. Each id keeps its own row, or has
none until it is admitted again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cpr_ext.recovery.findings import Findings
from cpr_ext.state.slot_keys import EMPTY, repeated
from cpr_ext.state.table import Table

_LIVE, _NEWEST, _OLDER = 2, 1, 0


def settle_slots(
    table: Table, restored: Iterable[tuple[int, int]], findings: Findings
) -> torch.Tensor:
    """Empty the slots of a keyed table whose key another slot has with more right.

    So are slots that are missing, and those with a number that is no key.

    Args:
        restored: the ranges [begin, end) of slots that were restored; all others are live.
        findings: ``rows_of_other_ids`` is counted.

    Returns:
        (n,) int64, the slots that were emptied.
    """
    assert table.slots is not None
    key = table.slots.key.cpu()
    rank = torch.full((len(key),), _LIVE, dtype=torch.int8)
    for begin, end in restored:
        rank[begin:end] = _NEWEST
    rank[findings.not_newest(table.name)] = _OLDER
    invalid = torch.nonzero(key < EMPTY).flatten()
    missing = findings.missing_rows.get(table.name, invalid[:0])
    others = torch.unique(torch.cat([_losers(key, rank), invalid]))
    others = others[~torch.isin(others, missing)]
    findings.rows_of_other_ids += len(others)
    emptied: torch.Tensor = torch.unique(torch.cat([others, missing]))
    _empty(table, emptied)
    table.slots.rebuild()
    return emptied


def _losers(key: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """Return the slots of each key that has several, but for one that ranks above all others."""
    slots = repeated(key, torch.arange(len(key)))
    slots = slots[torch.argsort(rank[slots], stable=True)]
    slots = slots[torch.argsort(key[slots], stable=True)]
    keys, ranks = key[slots], rank[slots]
    wins = torch.ones(len(slots), dtype=torch.bool)
    wins[:-1] = keys[:-1] != keys[1:]  # the last of a key ranks highest
    wins[1:] &= ranks[1:] > ranks[:-1]
    return slots[~wins]


def _empty(table: Table, slots: torch.Tensor) -> None:
    assert table.slots is not None
    with torch.no_grad():
        for array in table.arrays().values():
            array[slots.to(array.device)] = 0
        table.slots.key[slots.to(table.slots.key.device)] = EMPTY
