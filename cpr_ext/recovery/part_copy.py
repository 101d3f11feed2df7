"""The rows and columns that a live table takes from one stored table.

Weights, and state of the weight's shape, are cut and joined bit for bit. State of one value per row
belongs to all columns of a part. Where the columns are split differently, no value has its bits. It
then becomes the mean over the columns, which row-wise Adagrad would have accumulated for the whole
row. ``strict=True`` refuses that difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cpr_ext.state.slot_keys import is_key_array
from cpr_ext.state.table import NO_KEYS, Table
from cpr_ext.state.table_part import TablePart
from cpr_ext.storage.segment_format import ArraySpec
from cpr_ext.storage.store_reader import StoredTable


@dataclass(frozen=True)
class PartCopy:
    """What a live table takes from one stored table.

    Attributes:
        held, wanted: the parts that the store and the live table hold.
        common: the part that both hold.
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

    def takes(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return (n,) bool: which rows to take, as the store numbers them."""
        first, last = self.stored_rows
        return (row_ids >= first) & (row_ids < last)

    @property
    def has_same_columns(self) -> bool:
        """Rows can be taken as they are: the columns are cut alike."""
        return self.held.columns == self.wanted.columns

    @property
    def share(self) -> float:
        """Which share of the live table's columns it has."""
        return self.common.shape[1] / self.wanted.shape[1]

    def misfit(self, array: ArraySpec) -> str | None:
        """Return why an array of the store does not fit the live table; None if it fits."""
        what = f"'{self.wanted.table}/{array.name}'"
        live, row_shape = self.table.arrays().get(array.name), self._live_row_shape(array)
        if live is None and is_key_array(array.name):
            return NO_KEYS.format(table=self.wanted.table, array=array.name)
        if live is None and not self.table.can_make_row_state():
            return f"{what} is no state that the model's optimizer has"
        if row_shape is None:
            return f"{what} has rows of shape {array.row_shape}, which cannot be cut"
        if live is None or (live.dtype, tuple(live.shape[1:])) == (array.dtype, row_shape):
            return None  # the optimizer has not made it yet, or has one like it
        return (
            f"{what} has dtype {array.dtype} and rows of shape {array.row_shape}, the model "
            f"{live.dtype} and {tuple(live.shape[1:])}"
        )

    def make_place(self, array: ArraySpec) -> bool:
        """Make a per-row state that the optimizer has not made yet; False if it has no place."""
        if self.misfit(array) is not None:
            return False
        row_shape = self._live_row_shape(array)
        if array.name not in self.table.arrays() and row_shape is not None:
            self.table.make_row_state(array.name, row_shape, array.dtype)
        return True

    def put_all(self, arrays: Mapping[str, torch.Tensor]) -> int:
        """Write all rows to take of arrays that are in memory; return how many rows these are."""
        begin, end = self.stored_rows
        for name, values in arrays.items():
            if self.make_place(ArraySpec(name, values.dtype, tuple(values.shape[1:]))):
                self.put(name, torch.arange(begin, end), values[begin:end])
        return end - begin

    def put(self, array: str, row_ids: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows ``row_ids`` (n,) of those to take, as stored: ``values`` (n, ...)."""
        live = self.table.arrays()[array]
        rows = (row_ids + self.held.rows[0] - self.wanted.rows[0]).to(live.device)
        values = values.to(live.device)
        if live.dim() == 2 and not self.has_same_columns:
            live[rows, self._columns_in(self.wanted)] = values[:, self._columns_in(self.held)]
        elif self.share == 1:
            live[rows] = values
        else:
            live[rows] += self.share * values

    def _live_row_shape(self, array: ArraySpec) -> tuple[int, ...] | None:
        """Return the shape of a live row of such an array; None if its rows cannot be cut."""
        if self.has_same_columns or array.row_shape == ():
            return array.row_shape
        return self.wanted.shape[1:] if array.row_shape == self.held.shape[1:] else None

    def _columns_in(self, part: TablePart) -> slice:
        begin, end = self.common.columns
        return slice(begin - part.columns[0], end - part.columns[0])


def part_of(table: Table | StoredTable, *, as_whole: bool = False) -> TablePart:
    """Return the part that a table is; without one, or ``as_whole``, the whole table."""
    num_rows, dim = table.num_embeddings, table.embedding_dim
    whole = TablePart(table.name, (0, num_rows), (0, dim), num_rows, dim)
    return whole if as_whole or table.part is None else table.part
