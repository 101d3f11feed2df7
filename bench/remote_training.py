"""The cost of copying to training: stretches with a copy, and stretches without."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training import Protected, Run
from training_overhead import ratios_to_neighbours, stretch

from cpr_ext.storage.remote import RemoteOptions

BYTES_PER_SECOND = 10e6


class Paused:
    """Lets a copy pass, or not."""

    def __init__(self, spend: Callable[[int], None]) -> None:
        self._spend = spend
        self.is_open = threading.Event()

    def __call__(self, count: int) -> None:
        self.is_open.wait()
        self._spend(count)


def train(
    folder: Path, service: dict[str, Any], *, tiny: bool, every: float, rounds: int
) -> dict[str, Any]:
    """Return the speed of training while its base snapshot is copied, over that without."""
    run = Run(tiny=tiny, batch_size=2048)
    address = RemoteOptions(
        "s3://bucket/training",
        bytes_per_second=BYTES_PER_SECOND,
        wait_at_close_seconds=0.0,
        **service,
    )
    protected = Protected(run, folder / "store", remote=address)
    copy = protected.checkpointer._parts.remote
    assert copy is not None
    gate = Paused(copy._writer.spend)
    copy._writer.spend = gate
    protected.train_until_saved()
    sent_before = copy.status().bytes_sent

    def without() -> float:
        gate.is_open.clear()
        return stretch(run, every / 2, protected.train_step)

    off, on, copied_seconds = [without()], [], 0.0
    for _ in range(rounds):
        gate.is_open.set()
        began = time.perf_counter()
        on.append(stretch(run, every, protected.train_step))
        copied_seconds += time.perf_counter() - began
        lacked = copy.status().lag_bytes
        off.append(without())
    sent = copy.status().bytes_sent - sent_before
    gate.is_open.set()
    protected.close()
    ratios = ratios_to_neighbours(on, off)
    return {
        "group": "training",
        "name": "with a copy over without",
        "rounds": len(ratios),
        "stretch_seconds": every,
        "bytes_per_second": sent / copied_seconds,
        "copy_was_busy_to_the_end": lacked > 0,
        "samples_per_second": statistics.median(on),
        "samples_per_second_without": statistics.median(off),
        "ratio_to_none": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }
