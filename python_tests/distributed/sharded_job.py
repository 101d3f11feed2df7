"""The job that the tests of live recovery run and hurt: a small DLRM, rows sharded over workers.

Every worker journals what happens, with digests of its tables, one line per event.
"""

import errno
import faulthandler
import hashlib
import importlib
import json
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

import cpr_ext
from cpr_ext.distributed import Identity, TimeOuts, Worker
from cpr_ext.saving.snapshot import Snapshot
from cpr_ext.state.table import shard_row_range
from cpr_ext.storage.retention import Retention
from cpr_ext.wings.lab.dlrm import row_sharded
from cpr_ext.wings.lab.dlrm.model import DLRM
from cpr_ext.wings.lab.dlrm.movietweetings import MovieTweetings
from cpr_ext.wings.lab.dlrm.optimizers import build_optimizers
from cpr_ext.wings.lab.dlrm.presets import find_preset
from cpr_ext.wings.lab.dlrm.synthetic import Synthetic


@dataclass
class Settings:
    """One job; plain values, as they cross a pipe."""

    directory: str
    port: int
    host: str = "127.0.0.1"
    secret: str = "known to the workers of this job only"
    addresses: dict = field(default_factory=dict)
    stores: str = "stores"
    world_size: int = 4
    num_steps: int = 60
    movietweetings: str | None = None  # a folder of it; None: synthetic data
    digests: bool = True
    batch_size: int = 32
    step_seconds: float = 0.0
    load_seconds: float = 0.0
    every_steps: int = 5
    recovery: str = "partial"
    priority: str = "MostFrequentlyUsed"
    whole_steps: bool = False
    time_outs: dict = field(default_factory=dict)
    # rank -> what it does to itself in which life: ["training" | "saving" | "joining" |
    # "recovering" | "rolling back" | "lagging", step]
    suicides: dict = field(default_factory=dict)
    # what else the class below takes
    options: dict = field(default_factory=dict)
    # module and class of what the workers train
    job: tuple = ("python_tests.distributed.sharded_job", "ShardedJob")


SEED = 1


def make_source(settings):
    if settings.movietweetings is not None:
        return MovieTweetings(Path(settings.movietweetings))
    return Synthetic([300, 2000], num_samples=settings.batch_size * settings.num_steps)


class Journal:
    def __init__(self, path):
        self.path = Path(path)

    def write(self, event, **values):
        line = json.dumps({"event": event, "pid": os.getpid(), "time": time.time(), **values})
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, (line + "\n").encode())
        os.close(descriptor)

    def read(self):
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines(keepends=True)
        # The last one may be being written.
        return [json.loads(line) for line in lines if line.endswith("\n")]


def journal_of(settings, rank):
    return Journal(Path(settings.directory) / f"journal-{rank}")


def digest(tables):
    hashed = hashlib.sha256()
    for table in tables:
        for _, values in sorted(table.arrays().items()):
            hashed.update(values.numpy().tobytes())
    return hashed.hexdigest()


class RecoversSlowly(cpr_ext.Checkpointer):
    seconds = 0.0

    def recover(self, **options):
        time.sleep(self.seconds)
        return super().recover(**options)


class RecoversAndDies(cpr_ext.Checkpointer):
    def recover(self, **options):
        super().recover(**options)
        os.kill(os.getpid(), signal.SIGKILL)


class RollsBackAndDies(cpr_ext.Checkpointer):
    def recover(self, **options):
        report = super().recover(**options)
        if options.get("up_to_step", 0) > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return report


class Lags(cpr_ext.Checkpointer):
    """Dies in the commit of a point that is not before a step, once a peer has the next one, too.

    Class attributes: ``stores``, where the peer's is; ``dies_at``, the step.
    """

    stores, dies_at = Path(), 0

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        commit = Snapshot.commit

        def commit_late(snapshot):
            while snapshot.last_step >= self.dies_at:
                [dense] = self.stores.glob("worker-00000-of-*/MANIFEST.json")
                manifest = json.loads(dense.read_text())["content"]
                if manifest["dense"][-1]["last_step"] > snapshot.last_step:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.01)
            commit(snapshot)

        Snapshot.commit = commit_late


class CannotCommit(cpr_ext.Checkpointer):
    """This worker's disk is full after the step ``Lags.dies_at``, until a file "room" is there."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        commit = Snapshot._commit

        def commit_or_fail(snapshot):
            if snapshot.last_step > Lags.dies_at and not (Lags.stores.parent / "room").exists():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            commit(snapshot)

        Snapshot._commit = commit_or_fail


KINDS = {
    "lagging": Lags,
    "full disk": CannotCommit,
    "recovering": RecoversAndDies,
    "rolling back": RollsBackAndDies,
}


def leave_a_child(until):
    """Die, and leave a child that has all connections of this process until a file is there."""
    if os.fork() == 0:
        for _ in range(3000):
            if not until.exists():
                time.sleep(0.1)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


class ShardedJob:
    """The functions that a Worker asks for."""

    def __init__(self, settings, rank, life):
        self.settings, self.rank, self.life = settings, rank, life
        self.journal = journal_of(settings, rank)
        self.source = make_source(settings)
        self.suicide = settings.suicides.get(str(rank), {}).get(str(life))
        self.job_tables = []
        self.batches, self.next_step = None, -1

    def build(self, group):
        model = DLRM.from_preset(find_preset("tiny"), self.source, seed=SEED)
        ranges = [
            shard_row_range(rows, group.rank(), group.size()) for rows in self.source.num_embeddings
        ]
        row_sharded.shard_rows(model, ranges, group)
        return model, build_optimizers(model, self.source.recommended)

    def make_checkpointer(self, model, optimizers, directory):
        settings = self.settings
        kind = KINDS.get(self.suicide[0], RecoversSlowly) if self.suicide else RecoversSlowly
        RecoversSlowly.seconds = settings.load_seconds
        Lags.stores = Path(settings.directory) / settings.stores
        Lags.dies_at = self.suicide[1] if self.suicide else 0
        return self.watched(kind, model, optimizers, directory)

    def watched(self, make, model, optimizers, directory):
        settings = self.settings
        checkpointer = make(
            model,
            optimizers,
            directory,
            priority=getattr(cpr_ext, settings.priority)(),
            schedule=cpr_ext.EverySteps(settings.every_steps, when_busy="wait"),
            store=cpr_ext.StoreOptions(retention=Retention(full_recovery_points=3)),
            state={"step": lambda: self.next_step},
        )
        self.job_tables = checkpointer.tables
        return checkpointer

    def batch(self, step):
        if step != self.next_step:
            self.batches = self.source.train_batches(
                self.settings.batch_size, first_batch=step, seed=SEED
            )
        self.next_step = step + 1
        return next(self.batches)

    def train_step(self, job, step):
        if self.suicide == ["saving", step]:  # a snapshot is of a whole step
            job.checkpointer.save("base")
            os.kill(os.getpid(), signal.SIGKILL)
        batch = self.batch(step)
        part = row_sharded.own_part(batch, job.group)
        for optimizer in job.optimizers:
            optimizer.zero_grad()
        logits = job.model(part)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, part.labels, reduction="sum"
        )
        (loss / batch.batch_size).backward()
        dense = job.optimizers[1].param_groups[0]["params"]
        row_sharded.sum_gradients(dense, job.group)
        for optimizer in job.optimizers:
            optimizer.step()
        time.sleep(self.settings.step_seconds)
        if self.suicide == ["leaving a child", step]:
            leave_a_child(Path(self.settings.directory) / "over")
        if self.suicide == ["training", step]:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch.batch_size

    def describe(self):
        """What must be the same on all workers, by name."""
        return {}

    def final_state(self, model):
        """What is saved of the trained model, by name."""
        return model.state_dict()

    def observe(self, event):
        values = {"step": event.step}
        if self.settings.digests:
            values["tables"] = digest(self.job_tables)
        if event.kind in ("step", "recovered"):
            values["replicas"] = self.describe()
        if event.kind == "recovered":
            last = self.worker.recoveries[-1]
            values["recovery"] = vars(last)
        self.journal.write(event.kind, **values)
        if event.kind == "joined" and self.suicide and self.suicide[0] == "joining":
            os.kill(os.getpid(), signal.SIGKILL)

    def worker_options(self):
        known = self.settings.options
        return {name: known[name] for name in ("start_over",) if name in known}

    def initialize(self, model):
        """Give rows that nothing else gives values their first ones."""

    def run(self):
        settings = self.settings
        torch.set_num_threads(1)
        # From the settings: the processes that are forked have their parent's environment.
        address = settings.addresses.get(str(self.rank), "127.0.0.1")
        identity = Identity(
            self.rank,
            settings.world_size,
            settings.host,
            settings.port,
            address=address,
            secret=settings.secret,
        )
        self.journal.write("started", life=self.life)
        self.worker = Worker(
            identity,
            Path(settings.directory) / settings.stores,
            recovery=settings.recovery,
            time_outs=TimeOuts(**settings.time_outs),
            observe=self.observe,
            **self.worker_options(),
        )
        job = self.worker.run(
            self.build,
            self.train_step,
            num_steps=settings.num_steps,
            make_checkpointer=self.make_checkpointer,
            initialize=self.initialize,
            from_store=settings.options.get("from_store"),
        )
        if job is not None:
            state = {name: value.numpy() for name, value in self.final_state(job.model).items()}
            np.savez(Path(settings.directory) / f"model-{self.rank}.npz", **state)
        self.journal.write("ended", step=job.step if job else None)


def serve(port):
    """Host the rendezvous until killed."""
    store = torch.distributed.TCPStore(
        "0.0.0.0", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    assert store.port == port
    signal.pause()


def run_worker(plain, rank, life):
    settings = Settings(**plain)
    log = Path(settings.directory) / f"log-{rank}-{life}"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # On request: a watchdog that reads the frames of running threads may crash them.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    module, name = settings.job
    getattr(importlib.import_module(module), name)(settings, rank, life).run()
