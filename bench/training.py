"""A DLRM in training, with and without a Checkpointer: what several benchmarks measure on.

`kaggle` has the table sizes of Criteo Kaggle: 33.8 M rows, 2.3 GB with the optimizer's state; its
synthetic lookups have production's skew.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import cpr_ext
from cpr_ext.saving.schedules import Progress, Schedule
from cpr_ext.state.table import find_tables
from cpr_ext.wings.lab.dlrm.batch import Batch
from cpr_ext.wings.lab.dlrm.model import DLRM
from cpr_ext.wings.lab.dlrm.optimizers import build_optimizers
from cpr_ext.wings.lab.dlrm.presets import find_preset
from cpr_ext.wings.lab.dlrm.synthetic import Synthetic

NUM_SAMPLES = 64 * 2048  # made before the clock starts, used in turns
WARM_STEPS = 4


class Run:
    """A model in training.

    Args:
        num_embeddings: rows of each table, instead of the preset's.

    Attributes:
        number: training steps done.
    """

    def __init__(
        self,
        *,
        tiny: bool,
        batch_size: int,
        device: str = "cpu",
        num_embeddings: Sequence[int] | None = None,
    ) -> None:
        torch.manual_seed(0)
        preset = find_preset("tiny" if tiny else "kaggle")
        sizes = num_embeddings or preset.synthetic_num_embeddings
        num_samples = 16 * batch_size if tiny else max(NUM_SAMPLES, 16 * batch_size)
        self._device = device
        self._source = Synthetic(sizes, num_samples=num_samples, num_dense=13)
        self.model = DLRM.from_preset(preset, self._source).to(device)
        self.optimizers = build_optimizers(self.model, self._source.recommended)
        self.number = 0
        self.use_batches_of(batch_size)
        for _ in range(WARM_STEPS):
            self.train_step()
        self.tables = find_tables(self.model, self.optimizers)
        self.num_rows = sum(sizes)

    def use_batches_of(self, batch_size: int) -> None:
        self.batch_size = batch_size
        made = self._source.train_batches(batch_size)
        self._batches = [batch.to(self._device) for batch in made]

    @property
    def next_batch(self) -> Batch:
        return self._batches[self.number % len(self._batches)]

    def train_step(self) -> None:
        batch = self.next_batch
        self.number += 1
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        logits = self.model(batch)
        functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """All tensors of model and optimizers, by name: what a base snapshot holds."""
        tensors = dict(self.model.state_dict())
        for which, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor):
                        tensors[f"optimizer{which}.{index}.{name}"] = value
        return tensors


class OnDemand(Schedule):
    """Due once each time it is asked for."""

    is_asked = False

    def is_due(self, since_last: Progress) -> bool:
        was_asked, self.is_asked = self.is_asked, False
        return was_asked


class Protected:
    """A run under a Checkpointer that saves when asked and can be let go of for a while."""

    def __init__(self, run: Run, directory: Path, **options: Any) -> None:
        self.run = run
        self._schedule = OnDemand()
        self.checkpointer = cpr_ext.Checkpointer(
            run.model,
            run.optimizers,
            directory,
            schedule=self._schedule,
            **{"store": cpr_ext.StoreOptions(rebase_after=None), **options},
        )
        self.metrics = self.checkpointer.metrics

    def train_step(self) -> None:
        self.run.train_step()
        self.checkpointer.step(self.run.batch_size)

    def ask(self) -> None:
        """The next step begins a snapshot."""
        self._schedule.is_asked = True

    @property
    def num_snapshots(self) -> int:
        """Snapshots committed."""
        return self.metrics.base_snapshots + self.metrics.partial_snapshots

    def train_until_saved(self) -> None:
        """Train until one more snapshot is committed."""
        before = self.num_snapshots
        while self.num_snapshots == before:
            self.train_step()
            assert not self.metrics.failures, self.metrics.failures

    def let_go(self) -> None:
        """Take the hooks off the optimizers: until `watch`, train with `run.train_step`."""
        self.checkpointer._watch.detach()

    def watch(self) -> None:
        """Watch again; rows that changed meanwhile are no finding of the scrub."""
        self.checkpointer._watch.attach()
        self.checkpointer._saver.claims.forget()

    def close(self) -> None:
        self.checkpointer.close(save=False)


class PeakMemory:
    """How far resident memory rose over what it was when this was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        self._before = self._status("VmRSS")

    def rise_bytes(self) -> int:
        return self._status("VmHWM") - self._before

    @staticmethod
    def _status(name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
        raise RuntimeError(f"/proc/self/status has no {name}")


def in_own_process(script: str, name: str, *arguments: str, folder: str | None) -> Any:
    """Run ``script --child name --child-folder NEW ...``; what it prints last, from JSON."""
    with tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=folder) as own:
        command = [sys.executable, script, "--child", name, "--child-folder", own, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def seconds_of(action: Any) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
