"""Rows of one table on their way to a consumer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cpr_ext.state.dtypes import DTYPE_NAMES


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
