"""Where an attempt ends: what counts as a step, and what all workers must have alike."""

import asyncio
import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.distributed import Identity, Parity, TimeOuts, Worker
from cpr_ext.distributed.rendezvous.host import Host
from cpr_ext.distributed.rendezvous_host import listen
from cpr_ext.errors import WorkersDifferError

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

    def __init__(self, folder, port, rank, options=None):
        self.folder, self.rank = Path(folder), rank
        seconds = TimeOuts(collective_seconds=8.0, join_seconds=40.0, heartbeat_seconds=0.5)
        identity = Identity(rank, 2, "127.0.0.1", port, job="attempts", secret=SECRET)
        options = {"time_outs": seconds, **(options or {})}
        self.worker = Worker(identity, self.folder / "stores", **options)
        self.options = {"make_checkpointer": self.make}

    @staticmethod
    def make(model, optimizers, directory, **options):
        every = cpr_ext.EverySteps(2)
        return cpr_ext.Checkpointer(model, optimizers, directory, schedule=every, **options)

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

    def die(step):
        if life.once(step):
            os.kill(os.getpid(), signal.SIGKILL)

    def train_step(job, step):
        die(step)
        try:
            return train(job, step)
        except RuntimeError:
            return 1

    life.end(life.worker.run(build, train_step, num_steps=STEPS, **life.options))


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
    life.worker.run(build, train, num_steps=STEPS // 2, **life.options)
    life.end(life.worker.run(build, train, num_steps=STEPS, **life.options))


def evaluate(folder, port, rank):
    """Rank 1 evaluates at two steps, for longer than others wait for it in a collective."""
    life = Life(folder, port, rank, {"time_outs": TimeOuts(collective_seconds=1.5)})

    def train_step(job, step):
        if rank == 1 and step in (FAULT, FAULT + 3):
            time.sleep(3.5)
        return train(job, step)

    life.end(life.worker.run(build, train_step, num_steps=STEPS, **life.options))
    (life.folder / f"recoveries-{rank}").write_text(str(len(life.worker.recoveries)))


def without_tables(folder, port, rank):
    """Only rank 0 has a table, of which rank 1 holds the parity."""
    options = {"recovery": "exact", "parity": Parity(group_size=2)}
    life = Life(folder, port, rank, options)

    def build_own(group):
        model, optimizers = build(group)
        if rank == 1:
            model.table = Nothing()
            del optimizers[0]
        return model, optimizers

    if rank == 1:
        life.options["make_checkpointer"] = partial(life.make, tables=[])
    life.end(life.worker.run(build_own, train, num_steps=STEPS, **life.options))


class Nothing(nn.Module):
    def forward(self, ids):
        return torch.zeros(1)


def differ(folder, port, rank, of_one):
    """Rank 1 is given other options."""
    options = dict(of_one) if rank == 1 else {}
    num_steps = options.pop("num_steps", STEPS)
    if "parity" in options:
        options["parity"] = Parity(**options["parity"])
    life = Life(folder, port, rank, options)
    with pytest.raises(WorkersDifferError) as failure:
        life.worker.run(build, train, num_steps=num_steps, **life.options)
    (life.folder / f"said-{rank}").write_text(str(failure.value))


@pytest.fixture
def port():
    listener = listen("127.0.0.1", 0)
    serving = Host(SECRET.encode(), is_first=True).serve(listener)
    threading.Thread(target=asyncio.run, args=(serving,), daemon=True).start()
    return listener.getsockname()[1]


def run_both(nursery, function, folder, port, *arguments, dies=None):
    """Run both workers to their end; the one that is killed is started again."""
    ask = ("call", __name__, function, str(folder), port)
    pids = [nursery.ask(*ask, rank, *arguments) for rank in range(2)]
    if dies is not None:
        assert nursery.ask("wait", pids[dies], 60) == -signal.SIGKILL
        pids[dies] = nursery.ask(*ask, dies, *arguments)
    assert [nursery.ask("wait", pid, 90) for pid in pids] == [0, 0]


def assert_each_step_was_trained_once(folder):
    ends = [json.loads((folder / f"end-{rank}").read_text()) for rank in range(2)]
    assert ends[0] == ends[1]
    assert ends[0]["step"] == STEPS
    assert ends[0]["fate"][:STEPS] == [1.0] * STEPS


def test_a_step_whose_error_was_caught_in_it_does_not_count(nursery, tmp_path, port):
    run_both(nursery, "swallow", tmp_path, port, dies=1)
    assert_each_step_was_trained_once(tmp_path)


@pytest.mark.parametrize("between", [True, False], ids=["after the backward", "before it"])
def test_a_step_whose_error_was_caught_around_it_is_tried_again_by_all(
    nursery, tmp_path, port, between
):
    run_both(nursery, "own_loop", tmp_path, port, between)
    assert_each_step_was_trained_once(tmp_path)


def test_a_worker_runs_again(nursery, tmp_path, port):
    run_both(nursery, "twice", tmp_path, port)
    assert_each_step_was_trained_once(tmp_path)


def test_a_member_without_tables_takes_part_in_parity(nursery, tmp_path, port):
    run_both(nursery, "without_tables", tmp_path, port)
    assert_each_step_was_trained_once(tmp_path)


def test_an_evaluation_longer_than_a_time_out_is_passed(nursery, tmp_path, port):
    run_both(nursery, "evaluate", tmp_path, port)
    assert_each_step_was_trained_once(tmp_path)
    for rank in range(2):
        assert int((tmp_path / f"recoveries-{rank}").read_text()) <= 3  # on a busy machine


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_steps": STEPS + 1}, "num_steps (workers [0]: 12; workers [1]: 13)"),
        ({"check_every_steps": 7}, "check_every_steps (workers [0]: 1000; workers [1]: 7)"),
        ({"recovery": "full"}, "recovery (workers [0]: partial; workers [1]: full)"),
        (
            {"recovery": "exact", "parity": {"group_size": 2}},
            "recovery (workers [0]: partial; workers [1]: exact)",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_differ_are_named_at_once(nursery, tmp_path, port, options, said):
    run_both(nursery, "differ", tmp_path, port, options)
    for rank in range(2):
        assert said in (tmp_path / f"said-{rank}").read_text()
