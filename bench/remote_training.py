"""The cost of copying to training: stretches with a copy next to stretches without.

One thread trains, and the machine's other cores copy: what is left is what both share (memory, the
interpreter's lock, the disk). Processor time is counted in addition, as noise does not hide it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from paired import median_interval
from training import Protected, Run

from cpr_ext import StoreOptions
from cpr_ext.wings.remote import RemoteOptions

BYTES_PER_SECOND = 10e6
TARGET = 0.99  # of the speed without a copy


class Paused:
    """Lets a copy pass, or not."""

    def __init__(self, spend: Callable[[int], None]) -> None:
        self._spend = spend
        self.is_open = threading.Event()

    def __call__(self, count: int) -> None:
        self.is_open.wait()
        self._spend(count)


@dataclass(frozen=True)
class Stretch:
    """Some seconds of training.

    Attributes:
        training_cpu: seconds of the training thread, for each step.
        other_cpu: of this process's other threads, for each second.
    """

    samples_per_second: float
    training_cpu: float
    other_cpu: float


def stretch(run: Run, seconds: float, train_step: Callable[[], None]) -> Stretch:
    """Train for so long."""
    started, first = time.perf_counter(), run.number
    training, process = time.thread_time(), time.process_time()
    while (took := time.perf_counter() - started) < seconds:
        train_step()
    steps = run.number - first
    training = time.thread_time() - training
    others = time.process_time() - process - training
    return Stretch(steps * run.batch_size / took, training / steps, others / took)


def train(
    folder: Path, service: dict[str, Any], *, tiny: bool, every: float, rounds: int
) -> dict[str, Any]:
    """Return the speed of training while its base snapshot is copied, over that without.

    Each round has a stretch with a copy and one without, the first of them in turns.
    """
    run = Run(tiny=tiny, batch_size=2048)
    address = RemoteOptions(
        "s3://bucket/training",
        bytes_per_second=BYTES_PER_SECOND,
        wait_at_close_seconds=0.0,
        **service,
    )
    protected = Protected(run, folder / "store", store=StoreOptions(None, remote=address))
    copy = protected.checkpointer.store.origin
    assert copy is not None
    gate = Paused(copy._writer.spend)
    copy._writer.spend = gate
    protected.train_until_saved()
    torch.set_num_threads(1)
    sent_before = copy.status().bytes_sent
    found: dict[bool, list[Stretch]] = {True: [], False: []}
    copied_seconds, lacked = 0.0, 1
    for number in range(rounds):
        for copies in (number % 2 == 0, number % 2 == 1):
            (gate.is_open.set if copies else gate.is_open.clear)()
            began = time.perf_counter()
            found[copies].append(stretch(run, every, protected.train_step))
            if copies:
                copied_seconds += time.perf_counter() - began
                lacked = copy.status().lag_bytes
    sent = copy.status().bytes_sent - sent_before
    gate.is_open.set()
    protected.close()
    return {
        "group": "training",
        "name": "with a copy over without",
        "rounds": rounds,
        "stretch_seconds": every,
        "bytes_per_second": sent / copied_seconds,
        "copy_was_busy_to_the_end": lacked > 0,
        **compare(found[True], found[False]),
    }


def compare(on: list[Stretch], off: list[Stretch]) -> dict[str, Any]:
    """Return the medians of both, and of their ratios by round."""
    pairs = list(zip(on, off, strict=True))
    ratios = [a.samples_per_second / b.samples_per_second for a, b in pairs]
    low, high = median_interval(ratios)
    copying = [a.other_cpu - b.other_cpu for a, b in pairs]
    return {
        "samples_per_second": statistics.median(a.samples_per_second for a in on),
        "samples_per_second_without": statistics.median(b.samples_per_second for b in off),
        "ratio_to_none": round(statistics.median(ratios), 4),
        "interval_95": [round(low, 4), round(high, 4)],
        "target": verdict(low, high),
        "training_cpu_ratio": round(
            statistics.median(a.training_cpu / b.training_cpu for a, b in pairs), 4
        ),
        "cores_that_copy": round(statistics.median(copying), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def verdict(low: float, high: float) -> str:
    """Return what an interval says of the target."""
    if low >= TARGET:
        return "met"
    return "missed" if high < TARGET else "not decided"
