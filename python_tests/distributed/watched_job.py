"""A script for `cpr launch` that notes whenever something is unpickled, and trains until told."""

import os
import pathlib
import pickle
import sys
import time
import traceback

import torch
import torch.distributed.distributed_c10d as c10d

folder = pathlib.Path(sys.argv[1])
NUM_STEPS = 1500


def note_unpickling():
    with (folder / "unpickled").open("a") as file:
        traceback.print_stack(file=file)


def watched(function):
    def call(*arguments, **options):
        note_unpickling()
        return function(*arguments, **options)

    return call


for module, name in [(pickle, "load"), (pickle, "loads"), (c10d, "_unpickler"), (torch, "load")]:
    setattr(module, name, watched(getattr(module, name)))
# Whoever asks the class itself is seen as soon as it looks for anything that can do something.
sys.addaudithook(lambda event, _: note_unpickling() if event == "pickle.find_class" else None)

from cpr_ext.distributed import TimeOuts, Worker  # noqa: E402


def build(group):
    torch.manual_seed(group.rank())
    table = torch.nn.EmbeddingBag(10, 4, sparse=True)
    return torch.nn.ModuleList([table]), [torch.optim.SGD(table.parameters(), lr=0.1)]


def train_step(job, step):
    job.model[0](torch.tensor([[step % 10]])).sum().backward()
    torch.distributed.all_reduce(torch.ones(1))
    job.optimizers[0].step()
    if not (folder / "hurry").exists():
        time.sleep(0.05)
    while step == NUM_STEPS - 1 and not (folder / "hurry").exists():
        time.sleep(0.05)  # whoever watches has not seen all yet


def observe(event):
    with (folder / f"events-{worker.identity.rank}").open("a") as file:
        print(os.getpid(), event.kind, event.step, file=file)


worker = Worker.from_environment(
    folder, time_outs=TimeOuts(collective_seconds=10.0), observe=observe
)
worker.run(build, train_step, num_steps=NUM_STEPS)
