"""A job whose rows say which steps they had: the fate of every sample, on every worker.

``Settings.options``: ``model`` (see ``JOBS``), and ``hands``:
[[rank, step], ...], when a row is written by hand.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import cpr_ext
from python_tests.distributed.job import Job, die

ROWS, DIM, BATCH = 400, 8, 16
MODES = {  # the recovery, and options of parity
    "partial": ("partial", None),
    "full": ("full", None),
    "exact": ("exact", {}),
    "exact, rebuilt during training": ("exact", {"rebuild_rate": 200_000}),
    "partial with parity": ("partial", {}),
}
POINTS = ("begin", "forward", "reduced", "end")
_HERE = "python_tests.distributed.hosts."
# model -> the job that trains it
JOBS = {
    "plain": (_HERE + "fate_job", "FateJob"),
    "stateful": (_HERE + "fate_job", "FateJob"),
    "torchrec": (_HERE + "torchrec_job", "TorchRecJob"),  # stateful, too
}


class Head(nn.Module):
    """Dropout; with ``stateful`` batch and spectral norm, and a counter in no ``state_dict()``."""

    def __init__(self, stateful):
        super().__init__()
        norm = nn.BatchNorm1d(DIM) if stateful else nn.Tanh()
        last = nn.Linear(DIM, 1)
        if stateful:
            last = nn.utils.parametrizations.spectral_norm(last)
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), norm, nn.Dropout(0.1), last)
        self.stateful = stateful
        if stateful:
            self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, values):
        if self.stateful:
            self.calls += 1
            values = values * (1 + 0.01 * self.calls)
        return self.layers(values)


class FateJob(Job):
    def __init__(self, settings, rank, life):
        super().__init__(settings, rank, life)
        self.command = Path(settings.directory) / f"command-{rank}"

    def build(self, group):
        torch.manual_seed(100 + self.rank)
        rows = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
        fates = nn.EmbeddingBag(self.settings.num_steps, 1, mode="sum", sparse=True)
        nn.init.zeros_(fates.weight)
        torch.manual_seed(5)
        head = Head(self.settings.options["model"] == "stateful")
        self.model = nn.ModuleDict({
            "rows": rows, "fates": fates,
            "head": nn.parallel.DistributedDataParallel(head, broadcast_buffers=False),
        })  # fmt: skip
        self.optimizers = [
            torch.optim.Adagrad(rows.parameters(), lr=0.1),
            torch.optim.SGD(fates.parameters(), lr=1.0),
            torch.optim.Adam(head.parameters(), lr=0.01),
        ]
        return self.model, self.optimizers

    checkpointer = cpr_ext.Checkpointer

    def make_checkpointer(self, model, optimizers, directory):
        options = {"schedule": cpr_ext.EverySteps(10)}
        retention = cpr_ext.Retention(full_recovery_points=3)
        options["store"] = cpr_ext.StoreOptions(retention=retention)
        if self.settings.recovery == "full":
            options["priority"] = cpr_ext.AllRows()
            options["schedule"] = cpr_ext.EverySteps(10, when_busy="wait")
        return self.noted(self.checkpointer(model, optimizers, directory, **options))

    def train_step(self, job, step):
        if not (self.command.parent / "hurry").exists():
            time.sleep(self.settings.step_seconds)
        self.obey("begin")
        for rank, at in self.settings.options["hands"]:
            if (rank, at) == (self.rank, step):
                with torch.no_grad():
                    job.model["rows"].weight[step % ROWS] = 0.25
                was_protected = job.checkpointer.metrics.parity
                was_protected = was_protected is not None and was_protected.protected
                self.journal.write("hand", step=step, was_protected=was_protected)
        loss = self.loss(job, step)
        for optimizer in job.optimizers:
            optimizer.zero_grad()
        self.obey("forward")
        loss.backward()
        self.obey("reduced")
        for optimizer in job.optimizers:
            optimizer.step()
        self.obey("end")
        return BATCH * job.world_size

    def ids(self, step):
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randint(ROWS, (BATCH, 3), generator=generator)

    def loss(self, job, step):
        scores = job.model["head"](job.model["rows"](self.ids(step)))
        loss = nn.functional.softplus(scores).mean()
        return loss - job.model["fates"](torch.tensor([[step]])).sum()

    def obey(self, point):
        """Do what the test says, once, at the point that it says."""
        try:
            at, what, *seconds = self.command.read_text().split(" ")
        except (FileNotFoundError, ValueError):
            return
        if at != point:
            return
        self.command.unlink()
        self.journal.write("obeys", what=what, point=point, parent=os.getppid())
        match what:
            case "sleep" | "hold":  # the second keeps the interpreter
                library = {"sleep": ctypes.CDLL, "hold": ctypes.PyDLL}[what](None)
                whole, part = divmod(float(*seconds), 1)
                library.sleep(int(whole)), library.usleep(int(1e6 * part))
            case "wait":  # until somebody kills it
                signal.pause()
            case "leave":
                self.worker.leave()
            case "_exit":
                os._exit(3)
            case "exit":
                sys.exit(0)
            case "raise":
                raise ValueError("the test says so")
            case "segv":
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
                ctypes.string_at(0)
            case "kill":
                die()

    def final_state(self, job):
        """All that must end in the same bits."""
        return {
            "model": dict(job.model.state_dict()),
            "buffers": dict(job.model.named_buffers()),
            "optimizers": [optimizer.state_dict()["state"] for optimizer in job.optimizers],
            "generator": torch.get_rng_state(),
        }
