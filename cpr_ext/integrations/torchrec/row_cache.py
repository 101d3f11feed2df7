"""The cache of rows that FBGEMM keeps in a GPU's memory for tables in unified memory."""

from __future__ import annotations

from typing import Any

from cpr_ext.errors import UsageError

_PREFETCHED = (
    "a table with EmbeddingLocation.MANAGED_CACHING gets rows of later batches ahead "
    "(prefetch()), on another stream, so its cache cannot be read or forgotten between two steps. "
    "Leave prefetching out: TrainPipelineSparseDist, prefetch_pipeline=False"
)


def refuse_unsafe_cache(name: str, operator: Any) -> None:
    """Raise UsageError if rows of a table cannot be written from the cache as they are.

    Args:
        name: of the table.
        operator: the operator of FBGEMM that has it, with ``MANAGED_CACHING``.
    """
    if operator.prefetch_pipeline:
        raise UsageError(f"'{name}': {_PREFETCHED}")
    cached, table = operator.lxu_cache_weights.dtype, operator.weights_uvm.dtype
    if cached != table:
        raise UsageError(
            f"'{name}': its cache has {cached}, the table {table}, so a row would be saved rounded "
            "and trained on otherwise; use a cache_precision of the weights_precision"
        )


class RowCache:
    """Brings rows between the cache of one operator and the tables in unified memory.

    Only weights are cached; the state of fused optimizers is in unified memory alone. All calls
    come from the training thread between two steps. FBGEMM's kernels go to its current stream, as
    those that train do, and those that capture.
    """

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._is_newer = True

    def note_change(self) -> None:
        """Note that the cache may hold newer rows than the tables from now on."""
        self._is_newer = True

    def flush(self) -> None:
        """Write the cached rows to the tables, unless nothing was trained since the last time.

        Raises:
            UsageError: rows are prefetched on another stream.
        """
        if not self._is_newer:
            return
        if self._operator.prefetch_stream is not None:
            raise UsageError(_PREFETCHED)
        self._operator.flush()
        self._is_newer = False

    def forget(self) -> None:
        """Leave no row in the cache, before rows of the tables are overwritten.

        Raises:
            UsageError: rows of a later batch are there already.
        """
        self.flush()
        if self._operator.lxu_cache_locations_list:
            raise UsageError(_PREFETCHED)
        self._operator.reset_cache_states()
