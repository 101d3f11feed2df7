"""The environment in which TorchRec shards a model on a worker that others do not wait for."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torchrec.distributed import ShardingEnv, collective_utils

from cpr_ext.integrations.torchrec.planned_shards import take_shards_from_plans


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
