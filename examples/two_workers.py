"""Two workers with a table each and common dense layers; kill -9 either of them, at any moment.

    cpr launch --nproc 2 two_workers.py

Each worker trains the samples of its own users, whose rows it holds.
"""

import time

import torch
from torch.nn.parallel import DistributedDataParallel

import cpr_ext
from cpr_ext.distributed import Worker

USERS = 20_000  # of each worker


def build(group):
    torch.manual_seed(0)
    head = DistributedDataParallel(torch.nn.Linear(16, 1))
    torch.manual_seed(group.rank())
    table = torch.nn.EmbeddingBag(USERS, 16, sparse=True)
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (table, head)]
    return torch.nn.ModuleDict({"table": table, "head": head}), optimizers


def make_checkpointer(model, optimizers, directory):
    return cpr_ext.Checkpointer(model, optimizers, directory, schedule=cpr_ext.EverySteps(50))


def train_step(job, step):
    generator = torch.Generator().manual_seed(1000 * step + job.rank)  # from the number alone
    rows = (torch.rand(128, 4, generator=generator) ** 4 * USERS).long()
    labels = (rows.amin(1) < 200).float()
    logits = job.model["head"](job.model["table"](rows)).squeeze(1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    for optimizer in job.optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in job.optimizers:
        optimizer.step()
    if step % 50 == 0 and job.rank == 0:
        print(f"step {step:4d}  loss {loss:.4f}", flush=True)
    time.sleep(0.02)  # so that there is time for a kill
    return len(rows) * job.world_size


if __name__ == "__main__":
    worker = Worker.from_environment(store="ckpts")
    worker.run(build, train_step, num_steps=400, make_checkpointer=make_checkpointer)
