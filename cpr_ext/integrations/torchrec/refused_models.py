"""What of TorchRec cannot be saved, refused by name before anything is."""

from __future__ import annotations

from torch import nn
from torchrec.distributed.memory_stashing import MemoryStashingManager
from torchrec.distributed.model_parallel import DMPCollection

from cpr_ext.errors import UsageError


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
