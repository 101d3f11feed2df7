"""The parts of sharded tables that this rank holds, as views of FBGEMM's memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_tower_sharding import ShardedEmbeddingTower
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.memory_stashing import MemoryStashingManager
from torchrec.distributed.model_parallel import DMPCollection, get_unwrapped_module

from cpr_ext import Table
from cpr_ext.errors import StoreError, UsageError
from cpr_ext.integrations.torchrec.lookups import KernelLookups
from cpr_ext.integrations.torchrec.row_cache import RowCache, refuse_unsafe_cache
from cpr_ext.state.table import WEIGHT
from cpr_ext.state.table_part import TablePart

# What the tables of a sharded module are called in its state_dict().
_PREFIXES = {
    ShardedEmbeddingBagCollection: "embedding_bags",
    ShardedEmbeddingCollection: "embeddings",
}
# Fused optimizers that change, in backward, only rows that the forward pass looked up.
_CHANGE_LOOKED_UP_ROWS = {
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.ADAM,
    EmbOptimType.PARTIAL_ROWWISE_ADAM,
    EmbOptimType.LAMB,
    EmbOptimType.PARTIAL_ROWWISE_LAMB,
}


# What an operator calls the memory of tables. To torch, unified memory is on a CUDA device.
_MEMORY = {
    EmbeddingLocation.HOST: "weights_host",
    EmbeddingLocation.DEVICE: "weights_dev",
    EmbeddingLocation.MANAGED: "weights_uvm",
    EmbeddingLocation.MANAGED_CACHING: "weights_uvm",
}


@dataclass(frozen=True)
class Kernel:
    """The tables, or parts of tables, that one batched operator of FBGEMM looks up and updates.

    Attributes:
        module: the operator, with the memory of all of them.
        parts: of each of its tables, in its order; None for one that has no rows on this rank.
        fused: TorchRec's optimizer of these tables, which holds the learning rate.
    """

    module: SplitTableBatchedEmbeddingBagsCodegen
    parts: tuple[TablePart | None, ...]
    fused: torch.optim.Optimizer

    @property
    def table_names(self) -> list[str]:
        """Names of the tables that have rows on this rank."""
        return [part.table for part in self.parts if part is not None]


class ShardedTable(Table):
    """A part of a table in an operator's memory, with the state of the fused optimizer."""

    def __init__(self, part: TablePart, kernel: Kernel, index: int, lookups: KernelLookups) -> None:
        self._operator = kernel.module
        location = EmbeddingLocation(kernel.module.weights_physical_placements[index])
        self._memory_name = _MEMORY[location]
        is_cached = location == EmbeddingLocation.MANAGED_CACHING
        self._cache = lookups.cache if is_cached else None
        self._memory = self._address()
        self._states = _fused_states(kernel.module, index)
        weight = kernel.module.split_embedding_weights()[index]
        super().__init__(part.name, weight, lookups=lookups, part=part)

    def _address(self) -> int:
        memory: torch.Tensor = getattr(self._operator, self._memory_name)
        return memory.data_ptr()

    def row_states(self) -> dict[str, torch.Tensor]:
        """Return the fused optimizer's state of these rows, by its name in FBGEMM; views."""
        return dict(self._states)

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return the weight and every per-row state, each (num_embeddings, ...); views.

        Rows of a cache are written to the table first.

        Raises:
            UsageError: the operator has other memory than when the Checkpointer was made, or a
                pipeline stashes it, or prefetches into a cache.
        """
        if self._cache is not None:
            self._cache.flush()
        return self.clean_arrays()

    def clean_arrays(self) -> dict[str, torch.Tensor]:
        """See :meth:`cpr_ext.Table.clean_arrays`: a row that is clean was flushed when saved."""
        refuse_stashing(self.name)
        if self._address() != self._memory:
            raise UsageError(
                f"table {self.name!r} was moved to other memory (model.to() or reshard()); make a "
                "new Checkpointer after such a change"
            )
        return {WEIGHT: self.weight, **self._states, **self.key_arrays()}

    def begin_restore(self) -> None:
        """See :meth:`cpr_ext.Table.begin_restore`."""
        if self._cache is not None:
            self._cache.forget()

    def array_names(self) -> list[str]:
        """Return sorted names of the weight and its per-row states."""
        return sorted([WEIGHT, *self._states, *self.key_arrays()])

    def keep_row_states(self, names: Collection[str]) -> None:
        """Set every per-row state but these to zero, as the fused optimizer begins."""
        for name in self._states.keys() - set(names):
            self._states[name].zero_()

    def make_row_state(self, name: str, row_shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raise StoreError: a fused optimizer has all its state from the start."""
        raise StoreError(
            f"table {self.name!r}: the store holds optimizer state {name!r}, which the fused "
            f"optimizer {self._operator.optimizer} does not have; use the one it was made with"
        )

    def updates_only_looked_up_rows(self) -> bool:
        """Return whether a step changes only rows that were looked up since the last one."""
        return self._operator.optimizer in _CHANGE_LOOKED_UP_ROWS


def sharded_tables(kernels: Sequence[Kernel]) -> list[ShardedTable]:
    """Return the parts of tables that these operators hold; there may be none."""
    tables = []
    for kernel in kernels:
        lookups = KernelLookups(kernel.module, RowCache(kernel.module))
        for index, part in enumerate(kernel.parts):
            if part is not None:
                table = ShardedTable(part, kernel, index, lookups)
                lookups.tables[index] = table
                tables.append(table)
    return tables


def find_kernels(model: nn.Module) -> list[Kernel]:
    """Return the operators that hold the rows of this rank, in the order of the model's modules.

    Tables that the plan replicates (data parallel) are not among them: they are dense parameters.

    Raises:
        UsageError: a table is sharded in a way that cannot be saved (named).
    """
    refuse_replicas_of_shards(model)
    kernels, seen, unwrapped = [], [], get_unwrapped_module(model)
    for name, module in _modules_of(unwrapped):
        if _has_lookups(module) and not _lends_lookups(module):
            seen.append(f"{name}." if name else "")
            kernels += list(_kernels_of(name, module))
    for name, value in unwrapped.state_dict(keep_vars=True).items():
        is_rows = isinstance(value, ShardedTensor | DTensor) and name.endswith(f".{WEIGHT}")
        if is_rows and not name.startswith(tuple(seen)):
            raise UsageError(
                f"'{name}' is sharded by a module that does not show its tables, so they would not "
                "be saved; use EmbeddingBagCollection or EmbeddingCollection"
            )
    return kernels


def _modules_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules of a model by name, with those that towers leave out."""
    for name, module in model.named_modules():
        yield name, module
        if isinstance(module, ShardedEmbeddingTower) and module.embedding is not None:
            inner = ".".join(filter(None, (name, "embedding")))
            yield from module.embedding.named_modules(prefix=inner)


def _has_lookups(module: nn.Module) -> bool:
    return isinstance(module, ShardedEmbeddingModule) and bool(getattr(module, "_lookups", None))


def _lends_lookups(module: nn.Module) -> bool:
    """Return whether they are those of a module inside of it, as with feature processors."""
    inner = (each for each in module.modules() if each is not module)
    return any(_has_lookups(each) and each._lookups is module._lookups for each in inner)


def _kernels_of(name: str, module: Any) -> Iterator[Kernel]:
    prefix = next((p for kind, p in _PREFIXES.items() if isinstance(module, kind)), None)
    if prefix is None:
        raise UsageError(
            f"'{name}' is a {type(module).__name__}; can be saved: EmbeddingBagCollection and "
            "EmbeddingCollection"
        )
    for lookup in module._lookups:
        if isinstance(lookup, DistributedDataParallel):
            continue
        for inner in lookup._emb_modules:
            tables = inner.config.embedding_tables
            names = [".".join(filter(None, (name, prefix, table.name))) for table in tables]
            _require_savable(names, inner)
            parts = tuple(map(_part, names, tables))
            yield Kernel(inner.emb_module, parts, inner.fused_optimizer)


def _require_savable(names: Sequence[str], inner: Any) -> None:
    operator, kernel = inner.emb_module, inner.config.compute_kernel.value
    listed = ", ".join(f"'{name}'" for name in names)
    if not isinstance(operator, SplitTableBatchedEmbeddingBagsCodegen):
        raise UsageError(
            f"{listed}: compute kernel '{kernel}' cannot be saved; needed: 'fused'. Give the "
            "tables an optimizer with apply_optimizer_in_backward(), or change the plan"
        )
    for name, placement in zip(names, operator.weights_physical_placements, strict=True):
        location = EmbeddingLocation(placement)
        if location not in _MEMORY:
            raise UsageError(
                f"'{name}': EmbeddingLocation.{location.name}: an unknown place. Give the table "
                "compute kernel 'fused' in the plan: the GPU's memory, or the host's without one"
            )
        if location == EmbeddingLocation.MANAGED_CACHING:
            refuse_unsafe_cache(name, operator)
    if operator.optimizer == EmbOptimType.LARS_SGD or operator.optimizer == EmbOptimType.NONE:
        raise UsageError(f"{listed}: fused optimizer {operator.optimizer} has no state by row")


def _part(name: str, table: Any) -> TablePart | None:
    num_rows, num_columns = table.local_rows, table.local_cols
    if num_rows == 0 or num_columns == 0:
        return None
    row, column = table.local_metadata.shard_offsets if table.local_metadata else (0, 0)
    return TablePart(
        name,
        (row, row + num_rows),
        (column, column + num_columns),
        table.num_embeddings,
        table.embedding_dim,
    )


def _fused_states(operator: Any, index: int) -> dict[str, torch.Tensor]:
    if operator.optimizer == EmbOptimType.EXACT_SGD:  # has none, and no way to say so
        return {}
    states = operator.get_optimizer_state()[index]
    # "iter" counts steps of all tables; it is no row's.
    return {name: state for name, state in states.items() if name != "iter"}


def refuse_replicas_of_shards(model: nn.Module) -> None:
    """Raise UsageError for 2-D parallelism: groups of ranks that each have all shards."""
    if isinstance(model, DMPCollection):
        raise UsageError(
            "the model is a DMPCollection (2-D parallel): each group of ranks trains its own copy "
            "of the tables, and their mean replaces the rows of all from time to time. Such jobs "
            "are not saved yet; use DistributedModelParallel"
        )


def refuse_stashing(name: str) -> None:
    """Raise UsageError if a pipeline moves rows, or their state, to other memory meanwhile."""
    if MemoryStashingManager.is_enabled():
        raise UsageError(
            f"table '{name}': a pipeline stashes tables or optimizer state "
            "(TrainPipelineSparseDistOptStash, TrainPipelineSparseDistEmbStash, "
            "TrainPipelinePrefetchEMS): their memory is empty for a part of each step. Use "
            "TrainPipelineSparseDist"
        )
