"""A loop of the user's own: ``steps()`` and ``attempt()``. Losses: test_torchrun.py runs one."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from cpr_ext.distributed import Identity, Worker
from cpr_ext.distributed.rendezvous.host import Host
from cpr_ext.distributed.rendezvous_host import listen
from cpr_ext.errors import UsageError

SECRET = "of-the-tests-of-own-loops-and-no-other"
STEPS = 4


def build(group):
    model = torch.nn.EmbeddingBag(20, 2, sparse=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(job, step):
    job.optimizers.zero_grad()
    job.model(torch.tensor([[step]])).sum().backward()
    job.optimizers.step()


def loop(worker, what):
    tried = []
    for step in worker.steps(build, num_steps=STEPS):
        if what == "skips" and step == 2:
            continue
        with worker.attempt() as job:
            train(job, step)
            job.num_samples = 5
            tried.append((job.step, step))
        if what == "twice":
            with worker.attempt():
                pass
        if what == "breaks" and step == 2:
            break
        if what == "raises" and step == 2:
            raise KeyError("of the user")
    return tried


def run_loops(folder, port):
    """In a process of its own, as a process has one default group."""

    def new_worker(name):
        identity = Identity(0, 1, "127.0.0.1", port, job=name, secret=SECRET)
        return Worker(identity, Path(folder, name))

    worker = new_worker("whole")
    assert loop(worker, "") == [(step, step) for step in range(STEPS)]
    assert (worker.job.step, worker.job.checkpointer.num_samples) == (STEPS, 5 * STEPS)
    for what, error in (("skips", UsageError), ("twice", UsageError), ("raises", KeyError)):
        with pytest.raises(error, match=r"not tried|once: for step in|of the user"):
            loop(new_worker(what), what)
        assert len(loop(new_worker(what), "")) > 0  # the place and the group are free again
    worker = new_worker("breaks")
    assert len(loop(worker, "breaks")) == 3
    assert worker.job is None
    assert len(loop(new_worker("breaks"), "")) > 0
    with pytest.raises(UsageError, match="once: for step in"), worker.attempt():
        pass
    Path(folder, "done").touch()


def test_a_loop_of_ones_own_tries_each_step_once_and_leaves_nothing_behind(tmp_path, nursery):
    listener = listen("127.0.0.1", 0)
    serving = Host(SECRET.encode(), is_first=True).serve(listener)
    threading.Thread(target=asyncio.run, args=(serving,), daemon=True).start()
    port = listener.getsockname()[1]
    child = nursery.ask("call", __name__, "run_loops", str(tmp_path), port)
    assert nursery.ask("wait", child, 200) == 0
    assert (tmp_path / "done").exists()
