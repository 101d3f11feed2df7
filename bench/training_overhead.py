"""What saving costs training: samples per second, the longest pause and memory, ours and peers.

    python bench/training_overhead.py [--every 10] [--rounds 6] [--tiny] [--only X]

Trains DLRM at batch 2048. For each way to save, in a process of its own, stretches of `--every`
seconds that begin with a save and end when it is durable take turns with half as long ones without
saving, in which ours watches nothing either. The ratio of a stretch is its speed over the mean of
its two neighbours', so that a machine that is slower for a while slows both sides. Keeps
bench/results/training_overhead.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import savers
from bench_storage import write_raw
from results import keep, parser_of
from tqdm import tqdm
from training import PeakMemory, Protected, Run, in_own_process

import cpr_ext

HERE = Path(__file__).resolve().parent
FRACTION = 0.125
RAW = "raw direct writes"
MODES = {
    "row": "cpr_ext, 12.5 % of the rows, then those that have changed since, of one step",
    "dcp.async_save": "torch.distributed.checkpoint.async_save of everything",
    "torchsnapshot.async_take": "torchsnapshot.Snapshot.async_take of everything",
    "torch.save": "torch.save of everything",
    RAW: "a thread that writes as many bytes as 12.5 % of the rows have, and does nothing else",
}
PEERS: dict[str, type[savers.Peer]] = {
    "dcp.async_save": savers.DcpAsyncSave,
    "torchsnapshot.async_take": savers.TorchsnapshotAsyncTake,
    "torch.save": savers.TorchSave,
}


class Saving(ABC):
    """A way to save while ``run`` trains.

    Attributes:
        pause_seconds: the times that training was held, the longest of each save.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self.run = run
        self.folder = folder
        self.pause_seconds: list[float] = []

    def between(self) -> None:  # noqa: B027
        """A stretch without saving begins."""

    @abstractmethod
    def begin(self) -> None:
        """A stretch begins: save."""

    def train_step(self) -> None:
        """Train a step of a stretch with a save."""
        self.run.train_step()

    @abstractmethod
    def finish(self) -> None:
        """A stretch ends: wait until what was saved is durable."""

    def close(self) -> None:  # noqa: B027
        """Nothing is saved any more."""


class Ours(Saving):
    def __init__(self, run: Run, folder: Path, mode: str) -> None:
        super().__init__(run, folder)
        self.protected = Protected(
            run,
            folder / "store",
            priority=cpr_ext.MostFrequentlyUsed(FRACTION),
            store=cpr_ext.StoreOptions(None),
        )
        self.protected.train_until_saved()  # the base

    def between(self) -> None:
        self.protected.let_go()

    def begin(self) -> None:
        self.protected.watch()
        self.protected.metrics.max_stall_seconds = 0.0
        self._before = self.protected.num_snapshots
        self.protected.ask()

    def train_step(self) -> None:
        self.protected.train_step()

    def finish(self) -> None:
        self.protected.checkpointer.wait()
        assert self.protected.num_snapshots == self._before + 1, self.protected.metrics.failures
        self.pause_seconds.append(self.protected.metrics.max_stall_seconds)

    def close(self) -> None:
        self.protected.close()


class Other(Saving):
    def __init__(self, run: Run, folder: Path, mode: str) -> None:
        super().__init__(run, folder)
        self._saver = PEERS[mode](folder, run.state(), new_paths=True)
        self._saves = 0

    def begin(self) -> None:
        began = time.perf_counter()
        self._wait = self._saver.begin(self._saves)
        self.pause_seconds.append(time.perf_counter() - began)
        self._saves += 1

    def finish(self) -> None:
        self._wait()


class Raw(Saving):
    """What the same bytes cost at the least: the disk and the memory are shared with training."""

    def begin(self) -> None:
        path = self.folder / f"raw-{len(self.pause_seconds)}"
        num_bytes = int(FRACTION * sum(tensor.nbytes for tensor in self.run.state().values()))
        self._thread = threading.Thread(target=write_raw, args=(path, num_bytes))
        self._thread.start()
        self.pause_seconds.append(0.0)

    def finish(self) -> None:
        self._thread.join()


def make(mode: str, run: Run, folder: Path) -> Saving:
    if mode == RAW:
        return Raw(run, folder)
    return (Other if mode in PEERS else Ours)(run, folder, mode)


def stretch(
    run: Run,
    seconds: float,
    train_step: Callable[[], None],
    begin: Callable[[], None] = lambda: None,
    finish: Callable[[], None] = lambda: None,
) -> float:
    """Samples per second of so long a training, what is done before and after it included."""
    started, first = time.perf_counter(), run.number
    begin()
    while time.perf_counter() - started < seconds:
        train_step()
    finish()
    return (run.number - first) * run.batch_size / (time.perf_counter() - started)


def child(options: argparse.Namespace) -> None:
    run = Run(tiny=options.tiny, batch_size=options.batch_size)
    memory = PeakMemory()
    saving = make(options.child, run, Path(options.child_folder))

    def without() -> float:
        saving.between()
        os.sync()  # what a peer has left to the page cache is nobody else's burden
        return stretch(run, options.every / 2, run.train_step)

    off, on = [without()], []
    for _ in range(options.rounds):
        on.append(stretch(run, options.every, saving.train_step, saving.begin, saving.finish))
        off.append(without())
    saving.close()
    result = {
        "on": on,
        "off": off,
        "longest_pause_seconds": statistics.median(saving.pause_seconds),
        "peak_memory_over_training_bytes": memory.rise_bytes(),
    }
    print(json.dumps(result))


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    modes = [mode for mode in MODES if options.only in mode]
    arguments = ["--every", str(options.every), "--batch-size", str(options.batch_size)]
    arguments += ["--tiny"] * options.tiny

    def rounds(mode: str) -> list[str]:  # a peer's cost is far from none, ours needs more to tell
        return ["--rounds", str(-(-options.rounds // 2) if mode in PEERS else options.rounds)]

    return [
        summarize(
            mode, in_own_process(__file__, mode, *arguments, *rounds(mode), folder=options.folder)
        )
        for mode in tqdm(modes, unit="way", disable=None)
    ]


def ratios_to_neighbours(on: Sequence[float], off: Sequence[float]) -> list[float]:
    """Each speed with a save over the mean of those before and after it without."""
    return [
        2 * speed / (before + after)
        for speed, before, after in zip(on, off[:-1], off[1:], strict=True)
    ]


def summarize(mode: str, found: dict[str, Any]) -> dict[str, Any]:
    off = found["off"]
    ratios = ratios_to_neighbours(found["on"], off)
    return {
        "mode": mode,
        "what": MODES[mode],
        "rounds": len(ratios),
        "samples_per_second": round(statistics.median(found["on"])),
        "samples_per_second_without": round(statistics.median(off)),
        "ratio_to_none": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "longest_pause_seconds": found["longest_pause_seconds"],
        "peak_memory_over_training_bytes": found["peak_memory_over_training_bytes"],
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{'':<26}{'samples/s':>10}{'without':>10}{'ratio':>8}{'longest pause':>15}{'memory':>10}"
    )
    for row in rows:
        print(
            f"{row['mode']:<26}{row['samples_per_second']:>10}"
            f"{row['samples_per_second_without']:>10}{row['ratio_to_none']:>8.3f}"
            f"{1e3 * row['longest_pause_seconds']:>12.1f} ms"
            f"{row['peak_memory_over_training_bytes'] / 2**20:>6.0f} MiB"
        )


def main() -> None:
    parser = parser_of(__doc__, has_children=True)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between saves")
    parser.add_argument(
        "--rounds", type=int, default=6, help="stretches with a save; of peers half as many"
    )
    parser.add_argument("--batch-size", type=int, default=2048)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    rows = run_all(options)
    print_table(rows)
    if not (options.tiny or options.only):
        settings = {key: getattr(options, key) for key in ("every", "rounds", "batch_size")}
        keep("training_overhead", rows, settings=settings)


if __name__ == "__main__":
    main()
