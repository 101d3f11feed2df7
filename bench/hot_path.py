"""Measure the hot paths of one checkout, part by part, as `bench/regress.py` asks.

    python bench/hot_path.py CHECKOUT FOLDER [--tiny]

Not run by hand. The checkout's own package and its own bench/ are imported, so that an older commit
is measured by its own scripts; what is used of them has had the same name since c597dad. Each line
of standard input names a part; the answer is a line of JSON: a number by the name of each figure.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Comparisons of bench_*.py whose own operations are measured, by how their names begin.
OPERATIONS = {
    "bench_tracking": ("count 26 x 2048 lookups, zipf", "count 26 x 64 lookups, zipf"),
    "bench_selection": ("top 500000 of 4000000 zipf", "top 1250 of 10000 zipf"),
    "bench_staging": (
        "gather 500000 rows of 64 bytes",
        "pack and check 500000 rows of 64 bytes",
        "scatter 500000 rows of 64 bytes",
        "gather 5000 rows of 64 bytes",
    ),
}
#: Steps of a block by the batch size, with and without a Checkpointer.
BLOCKS = {128: 24, 2048: 4}
#: Steps while nothing is saved, next to those during a snapshot.
STEPS_AFTER = 4

Figures = dict[str, float]


class HotPath:
    """What is measured, of the checkout that modules are imported from.

    Args:
        folder: where stores are written.
    """

    def __init__(self, folder: Path, *, tiny: bool) -> None:
        from paired import Settings
        from training import Run

        self._folder = folder
        self._tiny = tiny
        self._run = Run(tiny=tiny, batch_size=128)
        self._protected: Any = None
        self._unwatched: Any = None
        self._opened = 0
        self._batch_size = 128
        self._chance = random.Random(0)
        self._settings = Settings(tiny, folder)
        self._operations: dict[str, tuple[Any, int]] = {}

    def measure(self, part: str) -> Figures:
        """Measure a part once; each figure is better the lower it is."""
        name, _, value = part.partition(" ")
        parts: dict[str, Callable[[str], Figures]] = {
            "operations": self._measure_operations,
            "base": self._measure_base,
            "watching": self._measure_watching,
            "snapshot": self._measure_snapshot,
        }
        return parts[name](value)

    def _measure_operations(self, _: str) -> Figures:
        """Seconds of a call of each operation."""
        import paired

        if not self._operations:
            for contender in self._find_operations():
                calls = 1 if self._tiny else paired._calibrate(contender)
                self._operations[contender.name] = contender, calls
        found = {}
        for name, (contender, calls) in self._operations.items():
            time.sleep(0.0 if self._tiny else paired._REST_SECONDS)
            found[name] = paired._time(contender, calls)
        return found

    def _find_operations(self) -> Iterator[Any]:
        for file, names in OPERATIONS.items():
            for comparison in importlib.import_module(file).comparisons(self._settings):
                if comparison.group.startswith(names):
                    for contender in comparison.contenders:
                        if contender.role == "ours":
                            yield named(contender, f"{contender.name}, {comparison.group}")

    def _measure_base(self, _: str) -> Figures:
        """Open a store; the longest pause of its base snapshot."""
        from pause import PRIORITY
        from training import Protected

        self._close()
        self._use_batches_of(2048)
        self._opened += 1
        store = self._folder / f"store-{self._opened}"
        self._protected = Protected(self._run, store, priority=PRIORITY)
        self._protected.train_until_saved()
        pause = self._protected.metrics.max_stall_seconds
        return {"longest pause of a base snapshot": pause}

    def _measure_watching(self, batch_size: str) -> Figures:
        """A median step under the Checkpointer, which saves nothing, over one without.

        Steps without one train another model: rows that change unseen would not count as clean.
        """
        from training import Run

        self._use_batches_of(int(batch_size))
        if self._unwatched is None:
            self._unwatched = Run(tiny=self._tiny, batch_size=self._batch_size)
        if self._unwatched.batch_size != self._batch_size:
            self._unwatched.use_batches_of(self._batch_size)
        steps = 2 if self._tiny else BLOCKS[int(batch_size)]
        seconds = {}
        for watched in self._chance.sample([True, False], 2):
            step = self._protected.train_step if watched else self._unwatched.train_step
            seconds[watched] = statistics.median(seconds_of(step) for _ in range(steps))
        return {
            f"watched step over one without, batch {batch_size}": seconds[True] / seconds[False],
            f"watched step, batch {batch_size}": seconds[True],
        }

    def _measure_snapshot(self, _: str) -> Figures:
        """A partial snapshot of 12.5 % of the rows, by training steps of batch 2,048."""
        from pause import fill_budget

        self._use_batches_of(2048)
        protected, metrics = self._protected, self._protected.metrics
        fill_budget(protected)
        metrics.max_stall_seconds = 0.0
        stalled, written, first = metrics.stall_seconds, metrics.bytes_written, self._run.number
        protected.ask()
        during = seconds_of(protected.train_until_saved) / (self._run.number - first)
        after = statistics.median(seconds_of(protected.train_step) for _ in range(STEPS_AFTER))
        return {
            "longest pause of a snapshot": metrics.max_stall_seconds,
            "all pauses of a snapshot": metrics.stall_seconds - stalled,
            "step during a snapshot over one after it": during / after,
            "bytes of a snapshot": metrics.bytes_written - written,
        }

    def _use_batches_of(self, batch_size: int) -> None:
        if self._tiny:
            batch_size = 128
        if batch_size != self._batch_size:
            self._run.use_batches_of(batch_size)
            self._batch_size = batch_size

    def _close(self) -> None:
        if self._protected is not None:
            self._protected.close()


def named(contender: Any, name: str) -> Any:
    """The contender under another name."""
    return type(contender)(**{**vars(contender), "name": name})


def seconds_of(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    root = options.checkout.resolve()
    sys.path[:1] = [str(root / "bench"), str(root)]  # instead of the folder of this file
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a benchmark prints is no answer
    import cpr_ext

    assert Path(cpr_ext.__path__[0]).is_relative_to(root)
    hot_path = HotPath(options.folder, tiny=options.tiny)
    print(json.dumps({}), file=answers)
    for line in sys.stdin:
        print(json.dumps(hot_path.measure(line.strip())), file=answers)


if __name__ == "__main__":
    main()
