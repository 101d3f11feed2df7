"""What users name: a table, and rows of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cpr_ext.errors import UsageError
from cpr_ext.state.table import Table


def find_table(tables: Sequence[Table], name: str) -> Table:
    """Return the table of a name; raises UsageError that lists those that are."""
    for table in tables:
        if table.name == name:
            return table
    names = ", ".join(table.name for table in tables)
    raise UsageError(f"no table {name!r}; there are: {names}")


def as_rows(table: Table, row_ids: torch.Tensor) -> torch.Tensor:
    """Return a copy (n,) int64 of row ids, on the device; raises UsageError for other ones."""
    if not isinstance(row_ids, torch.Tensor) or row_ids.dtype not in (torch.int32, torch.int64):
        raise UsageError(
            f"table {table.name!r}: rows are {getattr(row_ids, 'dtype', type(row_ids).__name__)}; "
            "needed: an int32 or int64 tensor"
        )
    one_piece = torch.contiguous_format
    rows = row_ids.to(table.weight.device, torch.int64, copy=True, memory_format=one_piece)
    rows = rows.reshape(-1)  # a copy, as the block may write to the given tensor
    low, high = (int(bound) for bound in rows.aminmax()) if rows.numel() else (0, 0)
    if not 0 <= low <= high < table.num_embeddings:
        raise UsageError(
            f"table {table.name!r} has {table.num_embeddings} rows; given: {low} to {high}"
        )
    return rows
