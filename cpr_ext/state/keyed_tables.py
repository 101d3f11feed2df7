"""What users name of keyed tables: a table, and slots of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cpr_ext.errors import UsageError
from cpr_ext.state.table import Table


def find_keyed(tables: Sequence[Table], name: str) -> Table:
    """Return the keyed table of a name; raises UsageError that lists those that are."""
    for table in tables:
        if table.name == name and table.slots is not None:
            return table
    keyed = ", ".join(table.name for table in tables if table.slots is not None) or "none"
    raise UsageError(f"no keyed table {name!r}; there are: {keyed}. Make it with Table(keys=...)")


def as_slots(table: Table, slots: torch.Tensor) -> torch.Tensor:
    """Return a copy (n,) int64 of slots, on the device; raises UsageError for other ones."""
    if not isinstance(slots, torch.Tensor) or slots.dtype not in (torch.int32, torch.int64):
        raise UsageError(
            f"table {table.name!r}: slots are {getattr(slots, 'dtype', type(slots).__name__)}; "
            "needed: an int32 or int64 tensor"
        )
    one_piece = torch.contiguous_format
    rows = slots.to(table.weight.device, torch.int64, copy=True, memory_format=one_piece)
    rows = rows.reshape(-1)  # a copy, as the block may write to the given tensor
    low, high = (int(bound) for bound in rows.aminmax()) if rows.numel() else (0, 0)
    if not 0 <= low <= high < table.num_embeddings:
        raise UsageError(
            f"table {table.name!r} has {table.num_embeddings} slots; given: {low} to {high}"
        )
    return rows
