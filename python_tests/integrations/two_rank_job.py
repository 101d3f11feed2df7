"""One rank of a job of two: trains under every plan, recovers in place, and into other plans.

What it holds at each point is left in DIRECTORY for the test that started it to compare.
"""

from pathlib import Path

import torch
import torch.distributed as dist

import cpr_ext
from cpr_ext.integrations.torchrec import make_checkpointer
from cpr_ext.tracking.trackers import native_trackers
from python_tests.helpers import open_checkpointer
from python_tests.integrations.sharded_models import (
    PLANS,
    copy_parts,
    join,
    sharded,
    train,
)

# plan of the stores -> (fused optimizer, the plan that they are recovered into)
CASES = {
    "table_wise": ("rowwise_adagrad", "row_wise"),
    "row_wise": ("rowwise_adagrad", "table_row_wise"),
    "column_wise": ("adagrad", "mixed"),
    "table_row_wise": ("sgd", "column_wise"),
    "mixed": ("adagrad", "first_rank"),
    "first_rank": ("rowwise_adagrad", "table_wise"),
}
assert CASES.keys() == set(PLANS)
NEVER = cpr_ext.EverySteps(10**6)
SAVED_STEPS, LOST_STEPS = 6, 2


def main(folder: str, rank: int, world_size: int) -> None:
    directory = Path(folder)
    join(directory / "meeting", rank, world_size)
    for plan, (fused, other) in CASES.items():
        result = {}
        store = directory / plan / f"rank-{rank}"
        make = {"priority": cpr_ext.MostFrequentlyUsed(1.0), "schedule": NEVER}
        make |= {
            "save_at_close": False,
            "make": make_checkpointer,
        }  # steps after the last save() are lost
        parallel, optimizer = sharded(plan, fused)
        with open_checkpointer(parallel, optimizer, store, **make) as checkpointer:
            train(parallel, optimizer, checkpointer, 1)
            checkpointer.wait()  # the base, of step 1
            train(parallel, optimizer, checkpointer, SAVED_STEPS - 1)
            result["counts"] = counted_updates(checkpointer)
            # Ranks save without a barrier: here at different moments between two steps.
            checkpointer.save("partial")
            checkpointer.wait()
            result["trained"] = copy_parts(checkpointer.tables)
            result["dense"] = parallel_dense(parallel)
            train(parallel, optimizer, checkpointer, LOST_STEPS)

        parallel, optimizer = sharded(plan, fused, seed=1)
        with open_checkpointer(parallel, optimizer, store, **make) as checkpointer:
            report = checkpointer.recover()
            result["recovered"] = copy_parts(checkpointer.tables)
            result["recovered_dense"] = parallel_dense(parallel)
            result["step"] = report.step
            train(parallel, optimizer, checkpointer, 1)

        dist.barrier()  # the stores of both ranks are read by both
        parallel, optimizer = sharded(other, fused, seed=2)
        olds = [directory / plan / f"rank-{old}" for old in range(2)]
        new = directory / f"{plan}-anew" / f"rank-{rank}"
        with open_checkpointer(parallel, optimizer, new, **make) as checkpointer:
            report = checkpointer.recover(from_store=olds)
            result["regrouped"] = copy_parts(checkpointer.tables)
            result["regrouped_dense"] = parallel_dense(parallel)
            train(parallel, optimizer, checkpointer, 1)
        torch.save(result, directory / f"{plan}-{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


def counted_updates(checkpointer):
    """Per table: the part, and how often each of its rows was looked up since it was saved."""
    return [(table.part, updates_of(checkpointer, table)) for table in checkpointer.tables]


def updates_of(checkpointer, table):
    counter = native_trackers(checkpointer._trackers[table.name])[-1]
    return torch.tensor(counter.counts()).long()


def parallel_dense(parallel):
    return {
        name: value.detach().clone()
        for name, value in parallel.state_dict().items()
        if type(value) in (torch.Tensor, torch.nn.Parameter)
    }
