"""Chosen rows of one table, without loading the rest."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from cpr_ext.errors import DamageError, RowIndexError
from cpr_ext.state.table import WEIGHT
from cpr_ext.storage.file_names import MANIFEST_FILE
from cpr_ext.storage.store_reader import NewestRows, Rows, StoreReader, read_committed


def read_rows(
    store: str | os.PathLike[str] | StoreReader,
    table: str,
    row_ids: torch.Tensor | Sequence[int],
    *,
    full: bool = False,
) -> Rows:
    """Read rows of one table as ``recover()`` would restore them.

    Only chunks that hold one of the rows are read, and the row ids of partial segments.

    Args:
        store: the directory, which a training process may be using; or a reader, whose view must
            stay.
        table: name of the table.
        row_ids: (n,) int64, in any order, also repeated.
        full: as of the newest full-recovery point, not of the newest snapshot.

    Returns:
        The rows in the order asked for: ``weight`` (n, embedding_dim), each per-row optimizer state
        (n, ...), and the step at which each was captured; see :class:`Rows`.

    Raises:
        StoreError: not a store, or it holds no snapshot.
        UsageError: no such table.
        RowIndexError: a row id that the table does not have.
        DamageError: what would have to be read is damaged.
    """
    if not isinstance(store, StoreReader):
        return read_committed(store, lambda reader: read_rows(reader, table, row_ids, full=full))
    reader = store
    wanted = torch.as_tensor(row_ids, dtype=torch.int64).reshape(-1)
    num_rows = reader.table(table).num_embeddings
    for row_id in wanted[(wanted < 0) | (wanted >= num_rows)][:1].tolist():
        raise RowIndexError(f"row {row_id} of '{table}' does not exist; it has {num_rows} rows")
    snapshot = reader.newest(full=full).snapshot
    unique, order = torch.unique(wanted, return_inverse=True)
    found = rows_of(reader, table, snapshot).chosen(unique)
    steps = found.steps[order]
    if bool((steps < 0).any()):
        raise DamageError(f"'{reader.directory}': rows of '{table}' are in no segment")
    return Rows(wanted, {name: array[order] for name, array in found.arrays.items()}, steps)


def rows_of(reader: StoreReader, table: str, snapshot: int) -> NewestRows:
    """Return the rows of ``table`` at ``snapshot``.

    Raises:
        DamageError: a segment's header is damaged, or a dtype or shape is not the table's.
    """
    rows = NewestRows(table, reader.rows_at(snapshot))
    stored = reader.table(table)
    weight = next((array for array in rows.arrays if array.name == WEIGHT), None)
    if weight is not None and (weight.dtype, weight.row_shape) != (
        stored.dtype,
        (stored.embedding_dim,),
    ):
        raise DamageError(
            f"'{reader.directory}': '{table}' is {weight.dtype} with rows of "
            f"shape {weight.row_shape}, in {MANIFEST_FILE} it is not"
        )
    return rows
