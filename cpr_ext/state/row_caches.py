"""Modules that keep the newest values of rows in a cache next to their table (FBGEMM).

The table in host memory holds old values of those rows, and nothing in PyTorch shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from cpr_ext.errors import UsageError
from cpr_ext.state.table import Table


def refuse_cached_rows(model: nn.Module, tables: Sequence[Table]) -> None:
    """Raise UsageError if a module of the model caches rows of a table.

    FBGEMM's TBE does so with ``EmbeddingLocation.MANAGED_CACHING``: rows reach the table only by
    its ``flush()``.
    """
    for module_name, module in model.named_modules():
        cached = _cached_memory(module)
        for table in tables:
            if cached is not None and table.weight.untyped_storage().data_ptr() == cached:
                raise UsageError(
                    f"table {table.name!r}: {type(module).__name__} {module_name!r} caches its "
                    "rows, so that older values would be saved. Place it with "
                    "EmbeddingLocation.DEVICE, or HOST, instead of MANAGED_CACHING"
                )


def _cached_memory(module: nn.Module) -> int | None:
    """Return the address of the table memory of which a module caches rows, if it does."""
    cache, memory = (getattr(module, name, None) for name in ("lxu_cache_weights", "weights_uvm"))
    if not (isinstance(cache, torch.Tensor) and isinstance(memory, torch.Tensor)):
        return None
    return memory.untyped_storage().data_ptr() if cache.numel() and memory.numel() else None
