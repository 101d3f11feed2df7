"""Jobs of several stores for the tests of the tools, made in one process."""

import shutil
from itertools import pairwise

import torch
from torch import nn

import cpr_ext
from cpr_ext.state.table import Table
from cpr_ext.state.table_part import TablePart
from cpr_ext.storage.job_stores import worker_directory
from cpr_ext.storage.retention import Retention
from python_tests.helpers import open_checkpointer

ROWS, DIM = 30, 4
WORKER_1 = "worker-00001-of-00003"


class ShardedModel(nn.Module):
    """Rows of table ``items`` that one worker holds, and a replicated linear layer."""

    def __init__(self, part, *, seed=0, dense_shape=(DIM, 2)):
        super().__init__()
        torch.manual_seed(seed)
        self.items = nn.EmbeddingBag(*part.shape, mode="sum")
        torch.manual_seed(1)  # replicas are the same
        self.linear = nn.Linear(*dense_shape)


def parts_of(world_size):
    bounds = [rank * ROWS // world_size for rank in range(world_size + 1)]
    return [TablePart("items", rows, (0, DIM), ROWS, DIM) for rows in pairwise(bounds)]


class WorkerAlone:
    """One worker of a job that trains without the others, so at steps of its own."""

    def __init__(self, directory, part, *, says_part=True, seed=0, dense_shape=(DIM, 2), **options):
        self.model = ShardedModel(part, seed=seed, dense_shape=dense_shape)
        weight = self.model.items.weight
        of_rows = torch.optim.Adagrad([weight], lr=0.1)
        dense = torch.optim.SGD(self.model.linear.parameters(), lr=0.1)
        name = part.name if says_part else "items"
        table = Table(name, weight, of_rows, [self.model.items], part=part if says_part else None)
        self.checkpointer = open_checkpointer(
            self.model, [of_rows, dense], directory, tables=[table], num_shards=2,
            schedule=cpr_ext.EverySteps(10**9),
            store=cpr_ext.StoreOptions(retention=Retention(full_recovery_points=2)),
            save_at_close=False, **options,
        )  # fmt: skip

    def train(self, num_steps):
        for _ in range(num_steps):
            step = self.checkpointer.step_count
            rows = torch.tensor([[step % self.model.items.num_embeddings, 0]])
            self.model.items(rows).sum().backward()
            for optimizer in self.checkpointer.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.checkpointer.step(8)

    def save(self, kind="base"):
        self.checkpointer.save(kind)
        self.checkpointer.wait()


def make_job(directory, steps=(3, 3, 3), **options):
    """A job whose workers have saved after so many steps each; returns them, closed."""
    workers = []
    for rank, (part, num_steps) in enumerate(zip(parts_of(len(steps)), steps, strict=True)):
        store = worker_directory(directory, rank, len(steps))
        worker = WorkerAlone(store, part, seed=10 + rank, **options)
        worker.train(num_steps)
        worker.save()
        worker.checkpointer.close()
        workers.append(worker)
    return workers


def uneven_job(directory):
    """A job of three workers that saved often; worker 2 is three steps ahead."""
    for rank, part in enumerate(parts_of(3)):
        worker = WorkerAlone(worker_directory(directory, rank, 3), part, seed=rank)
        worker.save()
        for _ in range(3):
            worker.train(2 + (rank == 2))
            worker.save("partial")
        worker.checkpointer.close()
    return directory


def foreign(job, *, rank=1, **options):
    """Put a store of another job in the place of worker 1 of 3."""
    make_job(job.parent / "foreign", **options)
    shutil.rmtree(job / WORKER_1)
    shutil.move(worker_directory(job.parent / "foreign", rank, 3), job / WORKER_1)


def gathered(workers):
    """The unsharded model's state_dict, and the state of its rows; the dense part of the first."""
    rows = [worker.model.items.weight.detach() for worker in workers]
    states = [w.checkpointer.tables[0].arrays()["sum"] for w in workers]
    dense = {f"linear.{n}": v.detach() for n, v in workers[0].model.linear.named_parameters()}
    return {**dense, "items.weight": torch.cat(rows)}, {"items.weight.sum": torch.cat(states)}
