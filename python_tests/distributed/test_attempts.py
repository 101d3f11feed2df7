"""Where an attempt ends: what counts as a step, and what all workers must have alike."""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.distributed import Identity, Parity, TimeOuts, Worker
from cpr_ext.errors import UsageError, WorkersDifferError

SECRET = "of-the-tests-of-attempts-and-no-other"
STEPS, FAULT = 12, 5


def build(group):
    """Each step adds 1 to its own element of ``fate``, which shows how often it was trained."""
    torch.manual_seed(0)
    model = nn.Module()
    model.table = nn.EmbeddingBag(40, 2, sparse=True, mode="sum")
    model.fate = nn.parallel.DistributedDataParallel(Fate())
    return model, [
        torch.optim.SGD(model.table.parameters(), lr=0.1),
        torch.optim.SGD(model.fate.parameters(), lr=1.0),
    ]


class Fate(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.Parameter(torch.zeros(4 * STEPS))

    def forward(self, step, pooled):
        return pooled.sum() * 0 - self.steps[step]


def train(job, step, fault=lambda step: None):
    for optimizer in job.optimizers:
        optimizer.zero_grad()
    job.model.fate(step, job.model.table(torch.tensor([[step]]))).backward()
    fault(step)
    for optimizer in job.optimizers:
        optimizer.step()
    return 1


class Life:
    """One worker of two, in a process of its own."""

    def __init__(self, folder, port, rank, **options):
        self.folder, self.rank = Path(folder), rank
        seconds = TimeOuts(collective_seconds=8.0, join_seconds=40.0, heartbeat_seconds=0.5)
        name = self.folder.name
        identity = Identity(rank, 2, "127.0.0.1", port, job=name, secret=SECRET)
        self.worker = Worker(identity, self.folder / "stores", **{"time_outs": seconds, **options})
        self.options = {"make_checkpointer": self.make}

    @staticmethod
    def make(model, optimizers, directory, **options):
        every = cpr_ext.EverySteps(2)
        return cpr_ext.Checkpointer(model, optimizers, directory, schedule=every, **options)

    def run(self, train_step=train, num_steps=STEPS, build=build):
        return self.worker.run(build, train_step, num_steps=num_steps, **self.options)

    def once(self, step):
        """Whether the fault is to come: once, at one step of rank 1."""
        if (self.rank, step) != (1, FAULT) or (self.folder / "fired").exists():
            return False
        (self.folder / "fired").touch()
        return True

    def end(self, job):
        told = {"step": job.step, "fate": job.model.fate.module.steps.tolist()}
        (self.folder / f"end-{self.rank}").write_text(json.dumps(told))


def swallow(folder, port, rank):
    """The usual "skip the batch on an error", around the step; the peer is killed in it."""
    life = Life(folder, port, rank)

    def train_step(job, step):
        if life.once(step):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return train(job, step)
        except RuntimeError:
            return 1

    life.end(life.run(train_step))


def own_loop(folder, port, rank, between):
    """A loop that catches its own error around an attempt, and goes on."""
    life = Life(folder, port, rank)

    def fail(step):
        if life.once(step):
            raise KeyError("a bad batch")

    for step in life.worker.steps(build, num_steps=STEPS, **life.options):
        try:
            with life.worker.attempt() as job:
                if not between:
                    fail(step)
                job.num_samples = train(job, step, fail if between else lambda step: None)
        except KeyError:
            continue
    life.end(life.worker.job)


def twice(folder, port, rank):
    life = Life(folder, port, rank)
    life.run(num_steps=STEPS // 2)
    life.end(life.run())


def evaluate(folder, port, rank):
    """Rank 1 evaluates at two steps, for longer than others wait for it in a collective."""
    life = Life(folder, port, rank, time_outs=TimeOuts(collective_seconds=1.0))

    def train_step(job, step):
        if rank == 1 and step in (FAULT, FAULT + 3):
            time.sleep(2.5)
        return train(job, step)

    life.end(life.run(train_step))
    assert len(life.worker.recoveries) == 1


def without_tables(folder, port, rank):
    """Only rank 0 has a table, of which rank 1 holds the parity; rank 1 is killed."""
    life = Life(folder, port, rank, recovery="exact", parity=Parity(group_size=2))

    def build_own(group):
        model, optimizers = build(group)
        if rank == 1:
            del model.table, optimizers[0]
            model.table = lambda ids: torch.zeros(1)
        return model, optimizers

    if rank == 1:
        life.options["make_checkpointer"] = partial(life.make, tables=[])

    def train_step(job, step):
        if life.once(step):
            os.kill(os.getpid(), signal.SIGKILL)
        return train(job, step)

    life.end(life.run(train_step, build=build_own))


def differ(folder, port, rank, *given):
    """Each rank is given options of its own."""
    options = dict(given[rank])
    num_steps = options.pop("num_steps", STEPS)
    if "parity" in options:
        options["parity"] = Parity(**options["parity"])
    life = Life(folder, port, rank, **options)
    with pytest.raises(WorkersDifferError) as failure:
        life.run(num_steps=num_steps)
    (life.folder / f"said-{rank}").write_text(str(failure.value))


def run_both(nursery, function, folder, place, *arguments, dies=None):
    """Run both workers to their end; the one that is killed is started again."""
    ask = ("call", __name__, function, str(folder), place[1])
    pids = [nursery.ask(*ask, rank, *arguments) for rank in range(2)]
    if dies is not None:
        assert nursery.ask("wait", pids[dies], 60) == -signal.SIGKILL
        pids[dies] = nursery.ask(*ask, dies, *arguments)
    assert [nursery.ask("wait", pid, 90) for pid in pids] == [0, 0]


@pytest.mark.parametrize(
    ("life", "arguments", "dies"),
    [
        ("swallow", (), 1),
        ("own_loop", (True,), None),
        ("own_loop", (False,), None),
        ("twice", (), None),
        ("evaluate", (), None),
        ("without_tables", (), 1),
    ],
)
def test_each_step_is_trained_once_whatever_happened_in_it(
    nursery, tmp_path, place, life, arguments, dies
):
    """See the docstring of each life."""
    run_both(nursery, life, tmp_path, place, *arguments, dies=dies)
    ends = [json.loads((tmp_path / f"end-{rank}").read_text()) for rank in range(2)]
    assert ends[0] == ends[1]
    assert ends[0]["step"] == STEPS
    assert ends[0]["fate"][:STEPS] == [1.0] * STEPS


EXACT = {"recovery": "exact", "parity": {"group_size": 2}}
EVERY_SECOND = {"recovery": "exact", "parity": {"group_size": 2, "every_steps": 2}}


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({}, {"num_steps": 13}, "num_steps (workers [0]: 12; workers [1]: 13)"),
        ({}, {"check_every_steps": 7}, "check_every_steps (workers [0]: 1000; workers [1]: 7)"),
        ({}, EXACT, "recovery (workers [0]: partial; workers [1]: exact)"),
        (EXACT, EVERY_SECOND, "Parity(every_steps=) (workers [0]: 1; workers [1]: 2)"),
    ],
)
def test_options_that_differ_are_named_at_once(nursery, tmp_path, place, one, other, said):
    run_both(nursery, "differ", tmp_path, place, one, other)
    for rank in range(2):
        assert said in (tmp_path / f"said-{rank}").read_text()


def loop(worker, what):
    tried = []
    for step in worker.steps(build, num_steps=STEPS):
        if what == "skips" and step == 2:
            continue
        with worker.attempt() as job:
            job.num_samples = 5 * train(job, step)
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


def test_a_loop_of_ones_own_tries_each_step_once_and_leaves_nothing_behind(
    nursery, tmp_path, place
):
    child = nursery.ask("call", __name__, "run_loops", str(tmp_path), place[1])
    assert nursery.ask("wait", child, 200) == 0
