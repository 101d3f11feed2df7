"""One rank of a job that trains under every plan, saves, and recovers in place."""

import torch
import torch.distributed as dist

import cpr_ext
from cpr_ext.distributed import worker_directory
from python_tests.integrations.sharded_models import (
    PLANS,
    copy_parts,
    dense_of,
    opened,
    sharded,
    train,
)

FUSED = {"column_wise": "adagrad", "table_row_wise": "sgd"}  # of others: rowwise_adagrad
SAVED_STEPS, LOST_STEPS = 6, 2


def under_each_plan(directory, rank):
    """By plan: what the rank held when it saved, and after it was recovered, and its counts."""
    found = {}
    for plan in PLANS:
        result = found[plan] = {}
        store = worker_directory(directory / plan, rank, dist.get_world_size())
        options = {"priority": cpr_ext.MostFrequentlyUsed(1.0)}
        parallel, optimizer = sharded(plan, FUSED.get(plan, "rowwise_adagrad"))
        with opened(parallel, optimizer, store, **options) as checkpointer:
            train(parallel, optimizer, checkpointer, 1)
            checkpointer.wait()  # the base, of step 1
            train(parallel, optimizer, checkpointer, SAVED_STEPS - 1)
            result["counts"] = [
                (table.part, counts_of(checkpointer, table)) for table in checkpointer.tables
            ]
            # Ranks save without a barrier: here at different moments between two steps.
            checkpointer.save("partial")
            checkpointer.wait()
            result["trained"] = copy_parts(checkpointer.tables), dense_of(parallel)
            train(parallel, optimizer, checkpointer, LOST_STEPS)
        parallel, optimizer = sharded(plan, FUSED.get(plan, "rowwise_adagrad"), seed=1)
        with opened(parallel, optimizer, store, **options) as checkpointer:
            result["step"] = checkpointer.recover().step
            result["recovered"] = copy_parts(checkpointer.tables), dense_of(parallel)
            train(parallel, optimizer, checkpointer, 1)
        dist.barrier()
    return found


def counts_of(checkpointer, table):
    counter = checkpointer._trackers[table.name]
    return torch.tensor(counter.counts()).long()
