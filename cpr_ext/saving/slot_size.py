"""How large a staging slot must be for the rows of given tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cpr_ext.errors import UsageError
from cpr_ext.state.precision import Precision, stored_row_bytes
from cpr_ext.state.table import Table

DEFAULT_SLOT_BYTES = 8 << 20
_BLOCK_BYTES = 4096  # files are written in blocks, see csrc/pipeline/segment_plan.h
_ROW_ID_BYTES = 8


def choose_slot_bytes(
    wanted: int | None, tables: Sequence[Table], precision: Precision | None = None
) -> int:
    """Return ``wanted``, or with None the default, or more if the tables' rows need it.

    Args:
        precision: in which snapshots keep the rows; None: exactly.

    Raises:
        UsageError: ``wanted`` does not hold the fewest rows of a table that can be written at once.
    """
    precision = precision or Precision()
    needed = max((_needed_bytes(table, precision) for table in tables), default=0)
    if wanted is None:
        return max(DEFAULT_SLOT_BYTES, math.ceil(needed / _BLOCK_BYTES) * _BLOCK_BYTES)
    for table in tables:
        if _needed_bytes(table, precision) > wanted:
            raise UsageError(
                f"table {table.name!r}: rows of {table.embedding_dim} columns, and their optimizer "
                f"state, do not fit into staging slots of {wanted} bytes; leave slot_bytes out, or "
                f"make it at least {_needed_bytes(table, precision)}"
            )
    return wanted


def _needed_bytes(table: Table, precision: Precision) -> int:
    """Bytes of the fewest rows of which every array fills whole blocks, or of the whole table.

    Rounded rows take fewer bytes, but may need more rows to fill whole blocks.
    """
    row_bytes = table.embedding_dim * table.weight.element_size()
    arrays = [row_bytes] * _num_arrays(table)
    arrays += [array[0].nbytes for array in table.key_arrays().values()] + [_ROW_ID_BYTES]
    rounded = []
    if table.weight.dtype == torch.float32:
        names = {precision.base, precision.partial, precision.state}
        rounded = [stored_row_bytes(table.embedding_dim, name) for name in names]
    unit = max(_BLOCK_BYTES // math.gcd(_BLOCK_BYTES, size) for size in [*arrays, *rounded])
    rows = min(unit, table.num_embeddings)
    pieces = [rows * size for size in arrays]
    return sum(math.ceil(size / _BLOCK_BYTES) * _BLOCK_BYTES for size in pieces)


def _num_arrays(table: Table) -> int:
    """Return the weight, and arrays of its size that the optimizer has or will make."""
    optimizer = table.optimizer
    num_arrays = 1 + len(table.row_states())
    if isinstance(optimizer, torch.optim.SGD):
        num_arrays = 2 if any(group.get("momentum") for group in optimizer.param_groups) else 1
    elif isinstance(optimizer, torch.optim.Adagrad):
        num_arrays = 2
    elif isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.SparseAdam):
        num_arrays = 4 if any(group.get("amsgrad") for group in optimizer.param_groups) else 3
    return num_arrays
