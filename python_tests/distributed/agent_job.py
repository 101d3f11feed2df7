"""A job as agents start it; what its workers do is in files of its folder.

    agent_job.py FOLDER [STEPS]

With ``STEPS``, each takes 0.2 s until there is a file ``hurry``. ``trains-RANK`` has the process
numbers of the worker that has this rank, and of its agent.

``fate-RANK`` says, once, what happens to a worker at the begin of a step: ``STEP kill`` or ``STEP
wait`` (until somebody kills it; ``waits-RANK`` has the process numbers of worker and agent).
"""

import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import cpr_ext
from cpr_ext.distributed import Parity, Worker

ROWS, STEPS = 200, 30


def build(group):
    torch.manual_seed(0)
    head = DistributedDataParallel(torch.nn.Linear(4, 1))
    torch.manual_seed(1 + group.rank())
    table = torch.nn.EmbeddingBag(ROWS, 4, sparse=True)
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (table, head)]
    return torch.nn.ModuleDict({"table": table, "head": head}), optimizers


def make_checkpointer(model, optimizers, directory):
    return cpr_ext.Checkpointer(model, optimizers, directory, schedule=cpr_ext.EverySteps(10))


def meet_fate(folder, rank, step):
    path = folder / f"fate-{rank}"
    if not path.exists() or int((fate := path.read_text().split())[0]) != step:
        return
    path.unlink()
    if fate[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    note(folder / f"waits-{rank}", f"{os.getpid()} {os.getppid()}")
    signal.pause()


def note(path, text):
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def train_step(folder, job, step, pause):
    if pause and not (folder / "hurry").exists():
        time.sleep(pause)
    meet_fate(folder, job.rank, step)
    generator = torch.Generator().manual_seed(1000 * step + job.rank)
    rows = torch.randint(ROWS, (16, 3), generator=generator)
    loss = job.model["head"](job.model["table"](rows)).square().mean()
    for optimizer in job.optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in job.optimizers:
        optimizer.step()
    return 16 * job.world_size


def main(folder, num_steps=STEPS, pause=0.0):
    torch.set_num_threads(1)
    logging.basicConfig()
    worker = Worker.from_environment(folder / "stores", recovery="exact", parity=Parity(2))
    size = worker.identity.world_size
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(worker.identity.rank), str(size))
    is_noted = False
    for step in worker.steps(build, num_steps=num_steps, make_checkpointer=make_checkpointer):
        with worker.attempt() as job:
            job.num_samples = train_step(folder, job, step, pause)
        if not is_noted:
            note(folder / f"trains-{job.rank}", f"{os.getpid()} {os.getppid()}")
            is_noted = True
    job = worker.job
    final = folder / f"final-{job.rank}.pt"
    torch.save(
        {
            "model": job.model.state_dict(),
            "optimizers": [optimizer.state_dict()["state"] for optimizer in job.optimizers],
            "lost": [recovery.lost for recovery in worker.recoveries],
        },
        final.with_suffix(".new"),
    )
    final.with_suffix(".new").replace(final)  # somebody waits for it, and reads it at once


if __name__ == "__main__":
    main(Path(sys.argv[1]), *((int(sys.argv[2]), 0.2) if sys.argv[2:] else ()))
