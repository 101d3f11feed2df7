"""The jobs that the tests of live recovery run and hurt: what all have, and a row-sharded DLRM."""

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
from pathlib import Path

import torch

import cpr_ext
from cpr_ext.distributed import Identity, Parity, TimeOuts, Worker
from cpr_ext.saving.snapshot import Snapshot
from cpr_ext.state.table import shard_row_range
from cpr_ext.wings.lab.dlrm import row_sharded
from cpr_ext.wings.lab.dlrm.model import DLRM
from cpr_ext.wings.lab.dlrm.movietweetings import MovieTweetings
from cpr_ext.wings.lab.dlrm.optimizers import build_optimizers
from cpr_ext.wings.lab.dlrm.presets import find_preset
from cpr_ext.wings.lab.dlrm.synthetic import Synthetic
from python_tests.distributed.journal import Settings, journal_of

SEED = 1


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def digest(tables):
    hashed = hashlib.sha256()
    for table in tables:
        for _, values in sorted(table.arrays().items()):
            hashed.update(values.numpy().tobytes())
    return hashed.hexdigest()


def commit_late(step, stores):
    """Die in the commit of a point that is not before a step, once a peer has the next one, too."""
    commit = Snapshot.commit

    def commit_late(snapshot):
        while snapshot.last_step >= step:
            [dense] = stores.glob("worker-00000-of-*/MANIFEST.json")
            if json.loads(dense.read_text())["content"]["dense"][-1]["last_step"] > (
                snapshot.last_step
            ):
                die()
            time.sleep(0.01)
        commit(snapshot)

    Snapshot.commit = commit_late


def disk_is_full(step, stores):
    """After a step, until there is a file "room"."""
    commit = Snapshot._commit

    def commit_or_fail(snapshot):
        if snapshot.last_step > step and not (stores.parent / "room").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        commit(snapshot)

    Snapshot._commit = commit_or_fail


def leave_a_child(until):
    """Die, and leave a child that has all connections of this process until a file is there."""
    if os.fork() == 0:
        for _ in range(3000):
            if not until.exists():
                time.sleep(0.1)
        os._exit(0)
    die()


class Job:
    """The functions that a Worker asks for.

    Moments of death: "saving", "committing", "reduced" and "leaving a child" of a step; "joining",
    "recovering", "rolling back"; "lagging" and "full disk" behind a step. ``Settings.options``: of
    parity ``group_size``, ``parity_hosts``, ``parity_every``, ``encode_rate``, ``rebuild_rate``;
    those of the Worker; ``loop``: ``own``, by ``steps()`` and ``attempt()``.
    """

    def __init__(self, settings, rank, life):
        self.settings, self.rank, self.life = settings, rank, life
        self.options = settings.options
        self.journal = journal_of(settings, rank)
        deaths = settings.deaths.get(str(rank), [])
        self.death = deaths[life - 1] if life <= len(deaths) else [None, None]
        self.job_tables, self.worker, self.metrics = [], None, None

    def watched(self, make, model, optimizers, directory, **options):
        """A checkpointer that this life's death is planned in."""
        where, number, *_ = self.death
        stores = Path(self.settings.directory) / self.settings.stores
        for kind, spoil in (("lagging", commit_late), ("full disk", disk_is_full)):
            if where == kind:
                spoil(number, stores)
        checkpointer = make(
            model, optimizers, directory,
            **{"priority": getattr(cpr_ext, self.settings.priority)(),
               "schedule": cpr_ext.EverySteps(self.settings.every_steps, when_busy="wait"),
               "store": cpr_ext.StoreOptions(retention=cpr_ext.Retention(3)), **options},
        )  # fmt: skip
        right = checkpointer.recover

        def recover(**given):
            time.sleep(self.settings.load_seconds)
            report = right(**given)
            if where == "recovering" or (where == "rolling back" and given.get("up_to_step", 0)):
                die()
            return report

        checkpointer.recover = recover
        return self.noted(checkpointer)

    def noted(self, checkpointer):
        self.job_tables, self.metrics = checkpointer.tables, checkpointer.metrics
        return checkpointer

    def between_steps(self, job, step):
        """A snapshot is of a whole step."""
        if self.death in (["saving", step], ["committing", step]):
            if self.death[0] == "committing":  # a moment before its manifest is replaced
                Path.replace = lambda *arguments: die()
            job.checkpointer.save("base")
            if self.death[0] == "committing":
                job.checkpointer.wait()
            die()

    def die_if(self, where, step):
        if self.death == [where, step]:
            die()

    def describe(self):
        """What must be the same on all workers, by name."""
        return {}

    def final_state(self, job):
        """What is saved of the trained job."""
        return dict(job.model.state_dict())

    def observe(self, event):
        values, parity = {"step": event.step}, self.worker._parity
        lacks_rows = getattr(parity, "_own", None) is not None and parity._own.missing.is_any
        if self.settings.digests and not lacks_rows:
            values["tables"] = digest(self.job_tables)
        if event.kind in ("step", "recovered"):
            values["replicas"] = self.describe()
        if event.kind == "recovered":
            values["recovery"] = vars(self.worker.recoveries[-1])
            values["epoch"] = self.worker._rendezvous.epoch
            deaths = {} if self.metrics is None else self.metrics.deaths
            values["deaths"] = [[*who, times] for who, times in deaths.items()]
        self.journal.write(event.kind, **values)
        if event.kind == "joined":
            self.die_if("joining", 0)

    def initialize(self, model):
        """Give rows that nothing else gives values their first ones."""

    def make_worker(self):
        settings = self.settings
        # From the settings: the processes that are forked have their parent's environment.
        address = settings.addresses.get(str(self.rank), "127.0.0.1")
        place = settings.world_size, settings.host, settings.port
        identity = Identity(self.rank, *place, address=address, secret=settings.secret)
        store = Path(settings.directory) / settings.stores
        return Worker(identity, store, **worker_options(settings), observe=self.observe)

    def run(self):
        torch.set_num_threads(1)
        self.journal.write("began", life=self.life, parent=os.getppid())
        self.worker = self.make_worker()
        options = {
            "num_steps": self.settings.num_steps, "make_checkpointer": self.make_checkpointer,
            "initialize": self.initialize, "from_store": self.options.get("from_store"),
        }  # fmt: skip
        if self.options.get("loop") != "own":
            self.worker.run(self.build, self.train_step, **options)
        else:
            for step in self.worker.steps(self.build, **options):
                with self.worker.attempt() as job:
                    job.num_samples = self.train_step(job, step)
        if (job := self.worker.job) is not None:
            new = Path(self.settings.directory) / f"final-{self.rank}.new"
            torch.save(self.final_state(job), new)
            new.replace(new.with_suffix(".pt"))
        self.journal.write("ended", step=job.step if job else None)


def worker_options(settings):
    known = settings.options
    options = {n: known[n] for n in ("start_over", "check_every_steps") if n in known}
    if "group_size" in known and settings.recovery in ("exact", "partial"):
        options["parity"] = Parity(
            group_size=known["group_size"],
            hosts=known.get("parity_hosts"),
            every_steps=known.get("parity_every", 1),
            encode_bytes_per_second=known.get("encode_rate"),
            rebuild_bytes_per_second=known.get("rebuild_rate"),
        )
    time_outs = TimeOuts(**settings.time_outs)
    return {"recovery": settings.recovery, "time_outs": time_outs, **options}


def make_source(settings):
    """Of ``options``: ``movietweetings``, a folder of it; without, synthetic data."""
    if "movietweetings" in settings.options:
        return MovieTweetings(Path(settings.options["movietweetings"]))
    return Synthetic([300, 2000], num_samples=settings.batch_size * settings.num_steps)


class DlrmJob(Job):
    """Rows are sharded over workers. ``options``: ``device``: tables are on an emulated GPU."""

    def __init__(self, settings, rank, life):
        super().__init__(settings, rank, life)
        if self.options.get("device"):
            self.emulator = emulated()
        self.source = make_source(settings)
        self.batches, self.next_step = None, -1

    def build(self, group):
        model = DLRM.from_preset(find_preset("tiny"), self.source, seed=SEED)
        ranges = [
            shard_row_range(rows, group.rank(), group.size()) for rows in self.source.num_embeddings
        ]
        row_sharded.shard_rows(model, ranges, group)
        return model, build_optimizers(model, self.source.recommended)

    def make_checkpointer(self, model, optimizers, directory):
        state = {"step": lambda: self.next_step}
        return self.watched(cpr_ext.Checkpointer, model, optimizers, directory, state=state)

    def batch(self, step):
        if step != self.next_step:
            self.batches = self.source.train_batches(
                self.settings.batch_size, first_batch=step, seed=SEED
            )
        self.next_step = step + 1
        return next(self.batches)

    def train_step(self, job, step):
        self.between_steps(job, step)
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
        self.die_if("reduced", step)
        for optimizer in job.optimizers:
            optimizer.step()
        time.sleep(self.settings.step_seconds)
        if self.death == ["leaving a child", step]:
            leave_a_child(Path(self.settings.directory) / "over")
        if self.options.get("device"):
            launched = self.emulator.calls().get("cudaLaunchKernelEx", 0)
            self.journal.write("kernels", step=step, launched=launched)
        return batch.batch_size


def emulated():
    """A device of this process's own, which was forked with the core for CPUs imported."""
    importlib.import_module("python_tests.emulated_gpu").emulate()
    return importlib.import_module("cpr_ext._emulated").emulator


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
