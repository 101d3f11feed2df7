"""What saving, loading and counting cost with this library on this machine and disk."""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from cpr_ext import Checkpointer, MostFrequentlyUsed, Progress, Schedule, StoreOptions
from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.dlrm.model import DLRM
from cpr_ext.wings.lab.dlrm.optimizers import build_optimizers
from cpr_ext.wings.lab.dlrm.presets import find_preset
from cpr_ext.wings.lab.dlrm.synthetic import Synthetic
from cpr_ext.wings.policy import JobCosts, JobSize

_SECONDS_PER_HOUR = 3600.0
_BATCHES = 16  # trained over and over; made beforehand


@dataclass(frozen=True)
class MeasuredSave:
    """One partial snapshot, captured over ``steps`` steps.

    Attributes:
        file_bytes: what it wrote.
        stall_seconds: how long it blocked training, the counting of lookups not included.
        slowdown_seconds: by how much the steps took longer meanwhile, for the writer takes cores
            and memory bandwidth from training; what other work on the machine took is in it too.
        durable_seconds: from its beginning until it was durable.
    """

    file_bytes: int
    steps: int
    stall_seconds: float
    slowdown_seconds: float
    durable_seconds: float


@dataclass(frozen=True)
class MeasuredCosts:
    """Of one server that holds one shard, with ``MostFrequentlyUsed``.

    Attributes:
        model, batch_size, fraction: what was trained meanwhile, and how much a save takes.
        state_bytes: rows and their optimizer state, of all tables.
        step_seconds: median training step, without the library.
        tracking_seconds: median time that ``Checkpointer.step`` blocks training while nothing is
            saved: counting lookups.
        saves: the measured saves.
        load_bytes, load_seconds: of restoring the whole shard from a base and these saves, until
            training can resume.
    """

    model: str
    batch_size: int
    fraction: float
    state_bytes: int
    step_seconds: float
    tracking_seconds: float
    saves: tuple[MeasuredSave, ...]
    load_bytes: int
    load_seconds: float

    @property
    def tracking_share(self) -> float:
        """Time that counting adds to training, as a share of it."""
        return self.tracking_seconds / self.step_seconds

    @property
    def stall_seconds(self) -> float:
        """Of a save of ``fraction`` of the rows; the median."""
        return statistics.median(save.stall_seconds for save in self.saves)

    def to_plain(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "saves": [asdict(save) for save in self.saves]}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> MeasuredCosts:
        """Invert :meth:`to_plain`."""
        saves = tuple(MeasuredSave(**save) for save in plain["saves"])
        return cls(**{**plain, "saves": saves})

    def scaled(self, job: JobSize, table_bytes: float, reschedule_hours: float) -> JobCosts:
        """Return costs of a job with ``table_bytes`` of rows, weights and optimizer state together.

        Time grows with the bytes of a shard, ``table_bytes / num_shards``. Every server holds one
        and saves it to a disk like this one, all at the same time. So does full recovery's load.
        Rescheduling is not this library's, and stays as given.

        Raises:
            UsageError: no bytes.
        """
        if not table_bytes > 0:
            raise UsageError(f"table bytes are {table_bytes}; they must be positive")
        scale = table_bytes / job.num_shards / self.state_bytes
        load_hours = scale * self.load_seconds / _SECONDS_PER_HOUR
        return JobCosts(
            save_hours=scale * self.stall_seconds / self.fraction / _SECONDS_PER_HOUR,
            load_hours=load_hours,
            load_shard_hours=load_hours,
            reschedule_hours=reschedule_hours,
        )


def measure_costs(
    directory: Path,
    *,
    model: str = "kaggle",
    batch_size: int = 2048,
    fraction: float = 0.125,
    num_saves: int = 3,
    quiet_steps: int = 15,
) -> MeasuredCosts:
    """Train, save and recover on synthetic data, in ``directory``, which is removed after.

    Args:
        model: preset of the tables; ``kaggle`` holds 2.3 GB.
        num_saves: partial snapshots to measure.
        quiet_steps: steps timed without a snapshot.

    Raises:
        SnapshotError: a snapshot failed.
    """
    preset = find_preset(model)
    source = Synthetic(preset.synthetic_num_embeddings, num_samples=_BATCHES * batch_size)
    trainer = _Trainer(DLRM.from_preset(preset, source, seed=0), source, batch_size)
    shutil.rmtree(directory, ignore_errors=True)
    # One, as in the runs: several that wait for one another would make counting look cheap.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Checkpointer(
            trainer.model,
            trainer.optimizers,
            directory,
            priority=MostFrequentlyUsed(fraction),
            schedule=trainer.schedule,
            store=StoreOptions(rebase_after=None),
        ) as checkpointer:
            trainer.train()
            checkpointer.step(batch_size)  # the base
            checkpointer.wait()
            step_seconds, tracking_seconds = trainer.train_quietly(checkpointer, quiet_steps)
            saves = tuple(
                trainer.save(checkpointer, step_seconds, tracking_seconds) for _ in range(num_saves)
            )
            report = checkpointer.recover(shards=[0])
            state_bytes = _state_bytes(checkpointer)
            checkpointer.close(save=False)
    finally:
        torch.set_num_threads(num_threads)
        shutil.rmtree(directory, ignore_errors=True)
    return MeasuredCosts(
        model=preset.name,
        batch_size=batch_size,
        fraction=fraction,
        state_bytes=state_bytes,
        step_seconds=step_seconds,
        tracking_seconds=tracking_seconds,
        saves=saves,
        load_bytes=report.bytes_read,
        load_seconds=report.seconds,
    )


def _state_bytes(checkpointer: Checkpointer) -> int:
    arrays = (array for table in checkpointer.tables for array in table.arrays().values())
    return sum(array.nbytes for array in arrays)


class _WhenWanted(Schedule):
    wanted = False

    def is_due(self, since_last: Progress) -> bool:
        return self.wanted


class _Trainer:
    """A training loop that can be timed."""

    def __init__(self, model: DLRM, source: Synthetic, batch_size: int) -> None:
        self.model = model
        self.optimizers = build_optimizers(model, source.recommended)
        self.schedule = _WhenWanted()
        self._batch_size = batch_size
        self._batches = cycle(list(source.train_batches(batch_size)))
        self._generator = torch.Generator().manual_seed(0)

    def train(self) -> float:
        """Take one step; return how long it took."""
        started = time.perf_counter()
        batch = next(self._batches)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(self.model(batch), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
        return time.perf_counter() - started

    def train_quietly(self, checkpointer: Checkpointer, steps: int) -> tuple[float, float]:
        """Medians of a step and of what the checkpointer adds to it while it saves nothing."""
        timed = [(self.train(), self._stall(checkpointer)) for _ in range(steps)]
        trained, counted = zip(*timed, strict=True)
        return statistics.median(trained), statistics.median(counted)

    def save(
        self, checkpointer: Checkpointer, step_seconds: float, tracking_seconds: float
    ) -> MeasuredSave:
        """Save a partial snapshot of as many rows as its budget allows."""
        for table in checkpointer.tables:
            count = (table.num_embeddings // 2,)
            lookups = torch.randint(table.num_embeddings, count, generator=self._generator)
            checkpointer.record_lookups(table.name, lookups)
        self.train()
        self._stall(checkpointer)  # counts these lookups, which is not a save's cost
        self.schedule.wanted = True
        steps, trained, stalled = 0, 0.0, 0.0
        snapshot = None
        started = time.perf_counter()
        while snapshot is None or snapshot.state == "capturing":
            trained += self.train()
            before = checkpointer.metrics.stall_seconds
            snapshot = checkpointer.step(self._batch_size) or snapshot
            stalled += checkpointer.metrics.stall_seconds - before
            self.schedule.wanted = snapshot is None
            steps += 1
        snapshot.wait_until_done()
        durable_seconds = time.perf_counter() - started
        checkpointer.wait()
        return MeasuredSave(
            file_bytes=snapshot.file_bytes,
            steps=steps,
            stall_seconds=max(0.0, stalled - steps * tracking_seconds),
            slowdown_seconds=trained - steps * step_seconds,
            durable_seconds=durable_seconds,
        )

    def _stall(self, checkpointer: Checkpointer) -> float:
        before = checkpointer.metrics.stall_seconds
        checkpointer.step(self._batch_size)
        return checkpointer.metrics.stall_seconds - before
