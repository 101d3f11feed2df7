"""The position of the data: a killed run trains each sample once, in order, and ends in equal bits.

The matrix is a loader x an engine x the moments of its deaths. `make test` draws some of it.

test_positions.py N [SEED]    draws N of it
"""

import itertools
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import deque
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import cpr_ext
from cpr_ext.errors import UntrackedChangeWarning, UsageError
from cpr_ext.wings.callbacks.loops import ResumableLoader
from python_tests.distributed.losses import mlp, require_states
from python_tests.distributed.mlp_job import MlpJob
from python_tests.helpers import die, differences

SAMPLES, BATCH, EPOCHS, DRAWN = 18, 4, 3, 14
IN_EPOCH = 5  # the last has two samples
STEPS = IN_EPOCH * EPOCHS
torch.set_num_threads(1)


class Lines(IterableDataset):
    """Reads lines of a file, shuffled anew at each pass by torch's generator; has no length."""

    def __iter__(self):
        yield from torch.randperm(SAMPLES).tolist()


class NumpySampler:
    """Shuffles by NumPy's global generator."""

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        yield from np.random.permutation(SAMPLES).tolist()  # noqa: NPY002


class Shards(IterableDataset):
    """Each worker reads a shard of its own, and says how far it is; also that it is at the end."""

    def __init__(self):
        self.at, self.is_loaded = 0, False

    def __iter__(self):
        self.at, self.is_loaded = self.at if self.is_loaded else 0, False
        info = torch.utils.data.get_worker_info()
        own = (range(12), range(12, SAMPLES))[info.id]
        while self.at < len(own):
            self.at += 1
            yield own[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.is_loaded = state["at"], True


class Stream:
    """Events of three partitions, whose next offsets it has, as a consumer of Kafka; no end."""

    def __init__(self):
        self.offsets = {f"clicks-{partition}": 0 for partition in range(3)}

    def __iter__(self):
        while True:
            name = min(self.offsets, key=lambda name: (self.offsets[name] % 7, name))
            first = self.offsets[name]
            self.offsets[name] += BATCH
            number = int(name[-1])
            yield torch.tensor([100 * number + first + event for event in range(BATCH)])

    def state_dict(self):
        return self.offsets  # not a copy

    def load_state_dict(self, state):
        self.offsets = state


class File:
    """A reader of a rank's own file: an epoch is a pass over it."""

    def __init__(self, rank=0):
        self.rank, self.offset = rank, 0

    def __iter__(self):
        while self.offset < SAMPLES:
            ids = [1000 * self.rank + at for at in range(self.offset, SAMPLES)[:BATCH]]
            self.offset += BATCH
            yield torch.tensor(ids)
        self.offset = 0

    def state_dict(self):
        return {"rank": self.rank, "offset": self.offset}

    def load_state_dict(self, state):
        self.rank, self.offset = state["rank"], state["offset"]


def shuffled(kind=DataLoader, **options):
    return kind(range(SAMPLES), BATCH, shuffle=True, **options)


def noisy(samples):
    """As one that samples negatives."""
    noise = np.random.randint(0, 9, len(samples))  # noqa: NPY002
    return torch.tensor(samples) + SAMPLES * torch.from_numpy(noise)


def own():
    return torch.Generator().manual_seed(5)


TWO = {"num_workers": 2, "prefetch_factor": 3}
LOADERS = {
    "generator": lambda: shuffled(generator=own()),
    "no generator": shuffled,
    "sampler's generator": lambda: DataLoader(
        range(SAMPLES), BATCH, sampler=RandomSampler(range(SAMPLES), generator=own())
    ),
    "NumPy's generator": lambda: DataLoader(range(SAMPLES), BATCH, sampler=NumpySampler()),
    "noise": lambda: shuffled(generator=own(), collate_fn=noisy),
    "workers that stay": lambda: shuffled(generator=own(), persistent_workers=True, **TWO),
    "stateful": lambda: shuffled(StatefulDataLoader, generator=own()),
    "stateful, no generator": lambda: shuffled(StatefulDataLoader),
    "stateful, workers": lambda: shuffled(StatefulDataLoader, generator=own(), **TWO),
    "stateful, workers that stay": lambda: shuffled(
        StatefulDataLoader, generator=own(), persistent_workers=True, **TWO
    ),
    "stateful, every third step": lambda: shuffled(
        StatefulDataLoader, generator=own(), snapshot_every_n_steps=3, **TWO
    ),
    "iterable": lambda: DataLoader(Lines(), BATCH),
    "stateful iterable": lambda: StatefulDataLoader(Shards(), BATCH, generator=own(), **TWO),
    "stream": Stream,
    "file": File,
}
ENGINES = ("loop", "fit", "pipeline", "pipeline over epochs")


class Ahead:
    """A pipeline as TorchRec's: it trains a batch once the next two are on their way."""

    def __init__(self, train):
        self.train, self.waiting = train, deque()

    def progress(self, batches):
        while len(self.waiting) < 3 and (batch := next(batches, None)) is not None:
            self.waiting.append(batch)
        if not self.waiting:
            raise StopIteration
        self.train(self.waiting.popleft())


class _KilledError(Exception):
    pass


class Life:
    """A process that trains until it is killed, or to the end.

    Args:
        saves: the steps after which it saves; -n: between epochs, after the n-th.
        dies: after so many steps; a half: in the next one, whose batch was given.
    """

    def __init__(self, loader, engine, store, saves=(), dies=None):
        self.engine, self.saves, self.dies, self.seen = engine, saves, dies, {}
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        self.model = nn.Sequential(
            nn.Embedding(300, 4, sparse=True), nn.Dropout(0.3), nn.Linear(4, 1)
        )
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.batches = self.make(LOADERS[loader]())
        self.ckpt = cpr_ext.Checkpointer(
            *(self.model, self.optimizer, store),
            schedule=cpr_ext.EverySteps(10**6),
            priority=cpr_ext.AllRows(),
            state={"batches": self.batches, "scheduler": self.scheduler},
        )

    @staticmethod
    def make(loader):
        return ResumableLoader(loader)

    def train(self, batch):
        if self.dies == self.ckpt.step_count + 0.5:
            raise _KilledError
        self.seen[self.ckpt.step_count + 1] = batch.tolist()
        self.optimizer.zero_grad()
        self.model(batch % 300).square().sum().backward()
        self.optimizer.step()

    def end_step(self):
        self.ckpt.step(BATCH)
        self.note_step()

    def note_step(self):
        step = self.ckpt.step_count
        if step in self.saves:
            self.ckpt.save("base").wait_until_done()
        if step == self.dies:
            raise _KilledError

    def run(self):
        self.ckpt.recover()
        if self.engine != "fit":
            self.batches.follow(self.ckpt)
            self.run_epochs()
            return
        real = self.ckpt.step

        def step(num_samples):  # as the schedule would save
            real(num_samples)
            self.note_step()

        self.ckpt.step = step
        with self.batches.reporting_to(self.ckpt):
            self.run_epochs()

    def run_epochs(self):
        ahead, pipeline = None, Ahead(self.train)
        if self.engine == "pipeline over epochs":
            ahead = itertools.chain.from_iterable(
                self.batches for _ in range(self.batches.epoch, EPOCHS)
            )
        for epoch in range(self.batches.epoch, EPOCHS):
            batches = ahead or iter(self.batches)
            while self.ckpt.step_count < STEPS:
                try:
                    if self.engine.startswith("pipeline"):
                        pipeline.progress(batches)
                    else:
                        self.train(next(batches))
                except StopIteration:
                    break
                if self.engine != "fit":
                    self.end_step()
            if self.engine == "fit":
                self.scheduler.step()
            if -epoch - 1 in self.saves:
                handle = self.ckpt.save("base")
                if self.engine != "fit":  # whose last step ends when it begins the next epoch
                    handle.wait_until_done()

    def state(self):
        parts = self.model, self.optimizer, self.scheduler
        return [part.state_dict() for part in parts]

    def end(self):
        """By a kill, of its loader's workers, too: what it leaves is its store."""
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in torch.multiprocessing.active_children():
            child.kill(), child.join()
        signal.signal(signal.SIGCHLD, before)
        die(self.ckpt)


def fits(loader, engine):
    """A stream has no last batch; what draws from global generators does not far ahead."""
    if loader == "stream":
        return engine in ("loop", "pipeline")
    if loader == "noise":
        return not engine.startswith("pipeline")
    draws_globally = ("no generator", "iterable", "stateful, no generator", "NumPy's generator")
    return loader not in draws_globally or engine != "pipeline over epochs"


CELLS = [cell for cell in itertools.product(LOADERS, ENGINES) if fits(*cell)]


@cache
def whole(loader, engine):
    """What was trained in each step, and the state at the end, if nobody dies."""
    with tempfile.TemporaryDirectory() as folder:
        life = Life(loader, engine, Path(folder) / "store")
        life.run()
        life.end()
    assert [*life.seen] == [*range(1, STEPS + 1)]
    return life.seen, life.state()


def draw_deaths(chance):
    """(saves, dies) of each life: one to four of them, also of one epoch, at all its moments."""
    lives, at = [], 0
    for _ in range(chance.choice((1, 1, 2, 3))):
        first, last = at // IN_EPOCH * IN_EPOCH, (at // IN_EPOCH + 1) * IN_EPOCH
        saved = chance.choice((at + 1, last - 1, last, first + 1, chance.randint(at, STEPS)))
        saved = min(max(saved, at), STEPS)
        is_between = saved % IN_EPOCH == 0 and saved > 0 and chance.random() < 0.4
        dies = saved + chance.choice((0.5, 1, 2, 0.5) if is_between else (0, 0.5, 1, 2))
        saves = (-(saved // IN_EPOCH),) if is_between else (saved,)
        lives.append((saves, STEPS if saved == STEPS else min(dies, STEPS - 0.5)))
        at = saved
    return lives


def try_cell(loader, engine, lives, folder, kind=Life):
    """What differs from a run that nobody killed."""
    seen = {}
    for saves, dies in [*lives, ((), None)]:
        life = kind(loader, engine, folder / "store", saves, dies)
        try:
            life.run()
        except _KilledError:
            assert dies is not None
        seen |= life.seen
        life.end()
    expected, state = whole(loader, engine)
    wrong = [step for step in expected if seen.get(step) != expected[step]]
    found = [f"step {step}: {seen.get(step)}, not {expected[step]}" for step in wrong]
    return found + differences(life.state(), state)


def draw(seed):
    chance = random.Random(seed)
    return *chance.choice(CELLS), draw_deaths(chance)


def be_strict():
    warnings.simplefilter("error", UntrackedChangeWarning)
    # Of a loader without a length a fit() ends the epoch late.
    warnings.filterwarnings("ignore", "StepLR.step")


@pytest.mark.parametrize("seed", range(DRAWN))
def test_a_killed_run_trains_each_sample_once_in_order(tmp_path, seed):
    loader, engine, lives = draw(seed)
    with warnings.catch_warnings():
        be_strict()
        assert try_cell(loader, engine, lives, tmp_path) == [], (loader, engine, lives)


class Planted(ResumableLoader):
    """Takes the batch that it gave last for the one that was trained."""

    def _settle(self):
        while self._given:
            self._trained = self._given.popleft()[1]


class PlantedLife(Life):
    make = Planted


@pytest.mark.parametrize("loader", ["generator", "stateful", "stream"])
def test_the_position_of_a_prefetched_batch_is_found(tmp_path, loader):
    lives = [((7,), 8)]
    assert try_cell(loader, "loop", lives, tmp_path / "loop", PlantedLife) == []
    found = try_cell(loader, "pipeline", lives, tmp_path / "pipeline", PlantedLife)
    assert found[0].startswith("step 8: ")


class Reading(MlpJob):
    """Workers each of which has a loader of its own; "loader" among the options."""

    def watched(self, make, model, optimizers, directory, **options):
        kind = self.options["loader"]
        self.batches = ResumableLoader(File(self.rank) if kind == "file" else LOADERS[kind]())
        state = {**options.pop("state", {}), "batches": cpr_ext.PerRank(self.batches)}
        ckpt = super().watched(make, model, optimizers, directory, state=state, **options)
        self.batches.follow(ckpt)
        return ckpt

    def train_step(self, job, step):
        self.ids = self.batches.batch_of(step).tolist()
        num_samples = super().train_step(job, step)
        self.journal.write("batch", step=step, ids=self.ids)
        return num_samples

    def draw_indices(self, job, generator):
        return torch.tensor(self.ids).repeat(16)[:16] % 40


@pytest.mark.parametrize(
    ("recovery", "loader"), [("exact", "stateful"), ("full", "generator"), ("partial", "file")]
)
def test_workers_that_die_three_times_in_an_epoch_train_each_sample_once(
    make_cluster, untouched, recovery, loader
):
    settings = mlp(recovery=recovery, num_steps=12, loader=loader)
    settings["job"] = (__name__, "Reading")
    if recovery == "partial":
        del settings["options"]["group_size"]
    deaths = {1: [["reduced", 6], ["optimizer", 8], ["forward", 9]]}
    cluster = make_cluster(deaths=deaths, **settings)
    cluster.run()
    assert len(cluster.recoveries()) == 4
    if recovery != "partial":
        require_states(cluster, untouched(settings))
    for rank in cluster.ranks:
        batches = File(rank) if loader == "file" else LOADERS[loader]()
        epochs = itertools.chain.from_iterable(batches for _ in range(EPOCHS))
        expected = {step: batch.tolist() for step, batch in zip(range(12), epochs, strict=False)}
        found = {e["step"]: e["ids"] for e in cluster.events(rank, "batch")}
        if recovery == "partial":  # a step in which it died is not trained again
            found |= {step: expected[step] for step in (6, 8, 9) if step not in found}
        assert found == expected


def test_what_cannot_be_right_is_named_with_the_way(tmp_path):
    model = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def opened(store, item):
        return cpr_ext.Checkpointer(model, optimizer, tmp_path / store, state={"data": item})

    with pytest.raises(UsageError, match=r"'data'.* is a DataLoader without .*ResumableLoader"):
        opened("a", shuffled())
    with pytest.warns(UntrackedChangeWarning, match=r"'data'.*StatefulDataLoader.*ResumableLoader"):
        opened("b", shuffled(StatefulDataLoader)).close()
    batches = ResumableLoader(shuffled(generator=own()))
    ckpt = opened("c", batches)
    with pytest.raises(UsageError, match=r"batches.follow\(ckpt\).* Lightning's Trainer takes"):
        next(iter(batches))
    batches.follow(ckpt)
    batches.load_state_dict({**batches.state_dict(), "step": 7})
    with pytest.raises(UsageError, match=r"batches is of step 7, training is at step 0: .*recover"):
        next(iter(batches))
    batches.load_state_dict({**batches.state_dict(), "step": 0, "batch": 5, "begun": True})
    with pytest.raises(UsageError, match=r"5 batches .* trained, the loader has 2"):
        next(iter(batches.over(DataLoader(range(2), generator=own()))))
    spent = ResumableLoader(iter([torch.tensor([1])] * 2))
    spent.follow(ckpt)
    with pytest.raises(UsageError, match=r"epoch 1 gives nothing after batch 0 .* exhausted"):
        [ckpt.step() for _ in range(2) for _ in spent]
    accumulating = ResumableLoader(torch.arange(200).split(1))
    accumulating.follow(ckpt)
    with pytest.raises(UsageError, match="65 batches were given and not trained"):
        list(accumulating)
    given = iter(batches.over(shuffled()))
    next(given)
    batches.load_state_dict(batches.state_dict())
    with pytest.raises(UsageError, match="begin a new loop"):
        next(given)
    of_steps = ResumableLoader(Stream())
    of_steps.follow(ckpt)
    with pytest.raises(UsageError, match=r"the batch of step 0 was given.*PerRank"):
        of_steps.batch_of(3), ckpt.step(), ckpt.step(), of_steps.batch_of(0)
    die(ckpt)


def main(number, first=0):
    """Draw so many, and say which are wrong."""
    begun, wrong, cells = time.monotonic(), 0, set()
    for seed in range(first, first + number):
        loader, engine, lives = draw(seed)
        cells.add((loader, engine))
        kept = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # the dead may write still
        with kept as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            be_strict()
            try:
                found = try_cell(loader, engine, lives, Path(folder))
            except Exception as error:
                found = [f"{type(error).__name__}: {error}"]
        if found:
            wrong += 1
            print(seed, loader, engine, lives, found[:3], flush=True)
    seconds = time.monotonic() - begun
    print(f"{number} draws, {len(cells)} of {len(CELLS)} cells, {wrong} wrong, {seconds:.0f} s")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(*map(int, sys.argv[1:]))))
