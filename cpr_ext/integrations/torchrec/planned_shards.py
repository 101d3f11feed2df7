"""Modules that are sharded on a worker that others do not wait for.

TorchRec has all ranks exchange where their shards of an ``EmbeddingCollection`` are, and the sizes
of their maps of managed collisions. The plan has both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard
from torchrec.distributed import ShardingEnv, collective_utils
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.modules.embedding_configs import data_type_to_dtype

from cpr_ext.distributed.collective.process_group import ReformableGroup

_Make = Callable[..., ShardedTensor]
_tables: Any = ShardedEmbeddingCollection._initialize_torch_state
_maps: Any = ShardedManagedCollisionCollection._initialize_torch_state


def take_shards_from_plans() -> None:
    """Have modules exchange nothing that are sharded over a worker's group; others do as before."""
    for kind, initialize in (
        (ShardedEmbeddingCollection, _initialize_tables),
        (ShardedManagedCollisionCollection, _initialize_maps),
    ):
        kind._initialize_torch_state = initialize


def _initialize_tables(module: Any, *args: Any, **options: Any) -> None:
    if not isinstance(module._env.process_group, ReformableGroup):
        _tables(module, *args, **options)
        return
    with _making(partial(_planned_table, module)):
        _tables(module, *args, **options)


def _planned_table(
    module: Any, local_shards: list[Shard], size: Any, *, process_group: ReformableGroup
) -> ShardedTensor:
    """Make a table's tensor as TorchRec makes those of an ``EmbeddingBagCollection``."""
    known = module._model_parallel_name_to_local_shards
    name = next(name for name, shards in known.items() if shards is local_shards)
    [data_type] = [each.data_type for each in module._embedding_configs if each.name == name]
    metadata = module.module_sharding_plan[name].sharding_spec.build_metadata(
        tensor_sizes=size, tensor_properties=TensorProperties(dtype=data_type_to_dtype(data_type))
    )
    return _sharded(local_shards, metadata, process_group)


def _initialize_maps(module: Any) -> None:
    if not isinstance(module._env.process_group, ReformableGroup):
        _maps(module)
        return
    plans = _plans(module)
    for name, shards in plans.items():
        own, total = shards[module._env.rank], sum(shard.shard_sizes[0] for shard in shards)
        module._mc_module_name_shard_metadata[name] = (
            own.shard_offsets[0],
            own.shard_sizes[0],
            total,
        )
    by_address = {
        buffer.data_ptr(): plans[name]
        for name, each in module._managed_collision_modules.items()
        for buffer in each.buffers()
    }
    with _making(partial(_planned_map, by_address)):
        _maps(module)


def _plans(module: Any) -> dict[str, list[ShardMetadata]]:
    """Return the row-wise shards of each table, by its name."""
    return {
        table.name: table.global_metadata.shards_metadata
        for sharding in module._embedding_shardings
        for group_config in sharding._grouped_embedding_configs
        for table in group_config.embedding_tables
    }


def _planned_map(
    plans: dict[int, list[ShardMetadata]],
    local_shards: Sequence[Shard],
    size: torch.Size,
    *,
    process_group: ReformableGroup,
) -> ShardedTensor:
    """Make a tensor with a value for each row; ``plans``: a table's shards by its address."""
    [local] = local_shards
    rest = list(size[1:])
    shards = [
        ShardMetadata(
            shard_offsets=[shard.shard_offsets[0], *(0 for _ in rest)],
            shard_sizes=[shard.shard_sizes[0], *rest],
            placement=shard.placement,
        )
        for shard in plans[local.tensor.data_ptr()]
    ]
    properties = TensorProperties(dtype=local.tensor.dtype)
    metadata = ShardedTensorMetadata(
        shards_metadata=shards, size=size, tensor_properties=properties
    )
    return _sharded(local_shards, metadata, process_group)


def _sharded(
    local_shards: Sequence[Shard], metadata: ShardedTensorMetadata, group: ReformableGroup
) -> ShardedTensor:
    made: ShardedTensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        list(local_shards), sharded_tensor_metadata=metadata, process_group=group
    )
    return made


@contextmanager
def _making(make: _Make) -> Iterator[None]:
    """Have torch make tensors, of which it would ask all ranks, by a function that knows."""
    asks = vars(ShardedTensor)["_init_from_local_shards"]
    ShardedTensor._init_from_local_shards = make  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardedTensor._init_from_local_shards = asks  # type: ignore[method-assign]


def sharding_env(group: dist.ProcessGroup) -> Any:
    """Return the ``env`` of a ``DistributedModelParallel`` that is built while other ranks train.

    ``ShardingEnv.from_process_group(group)``, and what TorchRec would exchange. Whether collectives
    are validated it would broadcast from rank 0: the environment variable
    ``TORCHREC_VALIDATE_COLLECTIVES`` must be the same on all ranks. Where the shards of an
    ``EmbeddingCollection`` are, and the sizes of maps of managed collisions, it would gather: they
    are those of the plan.
    """
    if not collective_utils._INITIALIZED:
        enabled = collective_utils._resolve_enablement_on_leader()
        collective_utils._USE_COLLECTIVE_VALIDATION = enabled
        collective_utils._INITIALIZED = True
    take_shards_from_plans()
    return ShardingEnv.from_process_group(group)
