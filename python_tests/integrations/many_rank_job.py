"""One rank of a job of several: trains under every plan and saves, for a test to export.

Beside the stores it leaves in DIRECTORY what the rank held when it saved.
"""

from pathlib import Path

import torch
import torch.distributed as dist

import cpr_ext
from cpr_ext.distributed import worker_directory
from cpr_ext.integrations.torchrec import make_checkpointer
from python_tests.integrations.sharded_models import PLANS, copy_parts, join, sharded, train
from python_tests.integrations.two_rank_job import parallel_dense

FUSED = {"column_wise": "rowwise_adagrad", "row_wise": "sgd"}  # of others: adagrad
STEPS = 4


def main(folder: str, rank: int, world_size: int) -> None:
    directory = Path(folder)
    join(directory / "meeting", rank, world_size)
    for plan in PLANS:
        parallel, optimizer = sharded(plan, FUSED.get(plan, "adagrad"))
        store = worker_directory(directory / plan, rank, world_size)
        options = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**6)}
        with make_checkpointer(parallel, optimizer, store, **options) as checkpointer:
            train(parallel, optimizer, checkpointer, STEPS)
            checkpointer.save("base")
            checkpointer.wait()
            result = copy_parts(checkpointer.tables), parallel_dense(parallel)
        torch.save(result, directory / f"{plan}-{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()
