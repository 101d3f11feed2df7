"""Managed collisions that are sharded on a worker that others do not wait for.

TorchRec gathers the sizes of all ranks' maps when it shards a module. The plan has them, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard
from torchrec.distributed import mc_modules

from cpr_ext.distributed.collective.process_group import ReformableGroup

_KIND: Any = mc_modules.ShardedManagedCollisionCollection
_gathered = _KIND._initialize_torch_state


def take_shards_from_plans() -> None:
    """Have modules gather nothing that are sharded over a worker's group; others do as before."""
    _KIND._initialize_torch_state = _initialize


def _initialize(module: Any) -> None:
    if not isinstance(module._env.process_group, ReformableGroup):
        _gathered(module)
        return
    plans = _plans(module)
    for name, shards in plans.items():
        own, total = shards[module._env.rank], sum(shard.shard_sizes[0] for shard in shards)
        module._mc_module_name_shard_metadata[name] = (
            own.shard_offsets[0],
            own.shard_sizes[0],
            total,
        )
    mc_modules.ShardedTensor = _PlannedTensors({
        buffer.data_ptr(): plans[name]
        for name, each in module._managed_collision_modules.items()
        for buffer in each.buffers()
    })  # fmt: skip
    try:
        _gathered(module)
    finally:
        mc_modules.ShardedTensor = ShardedTensor


def _plans(module: Any) -> dict[str, list[ShardMetadata]]:
    """Return the row-wise shards of each table, by its name."""
    return {
        table.name: table.global_metadata.shards_metadata
        for sharding in module._embedding_shardings
        for group_config in sharding._grouped_embedding_configs
        for table in group_config.embedding_tables
    }


class _PlannedTensors:
    """In the place of the class ``ShardedTensor``: makes tensors whose other shards are known.

    Args:
        plans: the shards of a table, by the address of a buffer that has a value for each row.
    """

    def __init__(self, plans: Mapping[int, Sequence[ShardMetadata]]) -> None:
        self._plans = plans

    def _init_from_local_shards(
        self, local_shards: Sequence[Shard], size: torch.Size, *, process_group: ReformableGroup
    ) -> ShardedTensor:
        [local] = local_shards
        rest = list(size[1:])
        shards = [
            ShardMetadata(
                shard_offsets=[shard.shard_offsets[0], *(0 for _ in rest)],
                shard_sizes=[shard.shard_sizes[0], *rest],
                placement=shard.placement,
            )
            for shard in self._plans[local.tensor.data_ptr()]
        ]
        metadata = ShardedTensorMetadata(
            shards_metadata=shards,
            size=size,
            tensor_properties=TensorProperties(dtype=local.tensor.dtype),
        )
        made: ShardedTensor = ShardedTensor._init_from_local_shards_and_global_metadata(
            list(local_shards), sharded_tensor_metadata=metadata, process_group=process_group
        )
        return made
