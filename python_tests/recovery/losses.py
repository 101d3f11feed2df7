"""What losing shards of a run does, in memory and on disk."""

import torch

import cpr_ext
from cpr_ext.state.table import shard_row_range

NUM_SHARDS = 4
OPTIONS = {"num_shards": NUM_SHARDS, "schedule": cpr_ext.EverySteps(3, when_busy="wait")}


def shard_range(table, shard):
    return slice(*shard_row_range(table.num_embeddings, shard, NUM_SHARDS))


def wipe(run, shards):
    """What losing a shard's memory does."""
    with torch.no_grad():
        for table in run.checkpointer.tables:
            for shard in shards:
                for array in table.arrays().values():
                    array[shard_range(table, shard)] = 7
