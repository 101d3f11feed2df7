"""What saving costs training: samples per second, the longest pause and memory, ours and peers.

    python bench/training_overhead.py [--seconds 30] [--every 10] [--rounds 3] [--tiny] [--only X]

Trains DLRM (`kaggle`: 33.8 M rows, 2.3 GB with the optimizer's state; synthetic lookups with
production's skew) at batch 2048 and saves every `--every` seconds. Each way to save runs in a
process of its own, all of them in every round, so that ratios are of neighbours in time. Keeps
bench/results/training_overhead.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from tqdm import tqdm

import cpr_ext
from cpr_ext.dlrm.model import DLRM
from cpr_ext.dlrm.optimizers import build_optimizers
from cpr_ext.dlrm.presets import find_preset
from cpr_ext.dlrm.synthetic import Synthetic
from cpr_ext.emulation.machine import describe_machine

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "training_overhead.json"
MODES = {
    "none": "no saving",
    "row": "cpr_ext, 12.5 % of the rows, captured over several steps",
    "step": "cpr_ext, 12.5 % of the rows, all as at one step",
    "row-inside": "as `row`, captured inside step() (overlap='never')",
    "dcp.async_save": "torch.distributed.checkpoint.async_save of everything",
    "torchsnapshot.async_take": "torchsnapshot.Snapshot.async_take of everything",
    "torch.save": "torch.save of everything",
}
NUM_BATCHES = 64  # made before the clock starts, used in turns


@dataclass
class Run:
    """A model in training and what was measured of it."""

    preset: str
    batch_size: int
    step_seconds: list[float] = field(default_factory=list)
    pause_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        preset = find_preset(self.preset)
        sizes = preset.synthetic_num_embeddings
        if self.preset == "kaggle":
            sizes = preset.uncapped_criteo_num_embeddings
        source = Synthetic(sizes, num_samples=NUM_BATCHES * self.batch_size, num_dense=13)
        self.model = DLRM.from_preset(preset, source)
        self.optimizers = build_optimizers(self.model, source.recommended)
        self.batches = list(source.train_batches(self.batch_size))

    def train_step(self, number: int) -> None:
        batch = self.batches[number % len(self.batches)]
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        logits = self.model(batch)
        functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> dict[str, Any]:
        """All tensors of model and optimizers, by name."""
        tensors = dict(self.model.state_dict())
        for which, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor):
                        tensors[f"optimizer{which}.{index}.{name}"] = value
        return tensors


def peer(mode: str, run: Run, folder: Path) -> Callable[[int], Callable[[], None]]:
    """save(number) -> wait(): a new path each time, the last but one removed."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    if mode == "dcp.async_save":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def save(number: int) -> Callable[[], None]:
        path = folder / f"save-{number}"
        old = folder / f"save-{number - 2}"
        if old.is_dir():
            shutil.rmtree(old)
        old.unlink(missing_ok=True)
        if mode == "torch.save":
            torch.save(run.state(), path)
            return lambda: None
        if mode == "dcp.async_save":
            return dcp.async_save(run.state(), checkpoint_id=path).result
        from torchsnapshot import Snapshot, StateDict

        return Snapshot.async_take(str(path), {"state": StateDict(**run.state())}).wait

    return save


def measure_peer(mode: str, run: Run, folder: Path, seconds: float, every: float) -> int:
    save = peer(mode, run, folder) if mode != "none" else None
    wait: Callable[[], None] = lambda: None  # noqa: E731
    started = next_save = time.perf_counter()
    saves = number = 0
    while (now := time.perf_counter()) - started < seconds:
        if save is not None and now >= next_save:
            wait()  # of two saves at a time none of the peers speaks
            wait = save(saves)
            run.pause_seconds.append(time.perf_counter() - now)
            saves += 1
            next_save += every
        began = time.perf_counter()
        run.train_step(number)
        run.step_seconds.append(time.perf_counter() - began)
        number += 1
    return saves


def measure_ours(mode: str, run: Run, folder: Path, seconds: float, every: float) -> int:
    checkpointer = cpr_ext.Checkpointer(
        run.model,
        run.optimizers,
        folder / "store",
        priority=cpr_ext.MostFrequentlyUsed(0.125),
        schedule=cpr_ext.EverySeconds(every),
        consistency="step" if mode == "step" else "row",
        overlap="never" if mode == "row-inside" else "auto",
        rebase_after=None,
    )
    for number in range(3):  # counts to select by, and the base
        run.train_step(number)
        checkpointer.step(run.batch_size)
    checkpointer.wait()
    checkpointer.metrics.max_stall_seconds = 0.0
    began_with = checkpointer.metrics.partial_snapshots
    checkpointer._last_start = (0, 0.0)  # due at once, as the peers' first save
    started = time.perf_counter()
    number = 3
    while time.perf_counter() - started < seconds:
        began = time.perf_counter()
        run.train_step(number)
        run.step_seconds.append(time.perf_counter() - began)
        checkpointer.step(run.batch_size)
        number += 1
    run.pause_seconds.append(checkpointer.metrics.max_stall_seconds)
    checkpointer.wait()
    saves = checkpointer.metrics.partial_snapshots - began_with
    assert checkpointer.metrics.failed_snapshots == 0, checkpointer.metrics.failures
    checkpointer.close()
    return saves


def child(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    run = Run("tiny" if options.tiny else "kaggle", options.batch_size)
    for number in range(4):
        run.train_step(number)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    folder = Path(options.child_folder)
    ours = options.child in ("row", "step", "row-inside")
    measure = measure_ours if ours else measure_peer
    saves = measure(options.child, run, folder, options.seconds, options.every)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps = len(run.step_seconds)
    print(
        json.dumps(
            {
                "samples_per_second": steps * options.batch_size / options.seconds,
                "saves": saves,
                "longest_pause_seconds": max(run.pause_seconds, default=0.0),
                "median_step_seconds": statistics.median(run.step_seconds),
                "peak_memory_over_training_bytes": (after - before) * 1024,
            }
        )
    )


def run_all(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    modes = [mode for mode in MODES if mode == "none" or options.only in mode]
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for mode in tqdm(modes * options.rounds, unit="run", disable=None):
        with tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=options.folder) as folder:
            command = [sys.executable, __file__, "--child", mode, "--child-folder", folder]
            command += ["--seconds", str(options.seconds), "--every", str(options.every)]
            command += ["--batch-size", str(options.batch_size)] + ["--tiny"] * options.tiny
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(f"{mode}:\n{done.stderr}")
            found[mode].append(json.loads(done.stdout.splitlines()[-1]))
    return found


def summarize(found: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    rows = []
    for mode, runs in found.items():
        speeds = [run["samples_per_second"] for run in runs]
        ratios = [
            mine / other["samples_per_second"]
            for mine, other in zip(speeds, found["none"], strict=True)
        ]
        row = {
            "mode": mode,
            "what": MODES[mode],
            "rounds": len(runs),
            "samples_per_second": round(statistics.median(speeds)),
            "ratio_to_none": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
        for key in runs[0]:
            if key != "samples_per_second":
                row[key] = statistics.median(run[key] for run in runs)
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'':<26}{'samples/s':>10}{'ratio':>8}{'saves':>7}{'longest pause':>15}{'memory':>10}")
    for row in rows:
        pause = f"{1e3 * row['longest_pause_seconds']:.1f} ms" if row["saves"] else "-"
        memory = f"{row['peak_memory_over_training_bytes'] / 2**20:.0f} MiB"
        print(
            f"{row['mode']:<26}{row['samples_per_second']:>10}{row['ratio_to_none']:>8.3f}"
            f"{row['saves']:>7.0f}{pause:>15}{memory:>10}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of training, for each way")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between saves")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--tiny", action="store_true", help="a small model, nothing is kept")
    parser.add_argument("--only", default="", help="ways whose name holds this; nothing is kept")
    parser.add_argument("--folder", help="where to save (default: the temporary folder)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--child-folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    rows = summarize(run_all(options))
    print_table(rows)
    if not (options.tiny or options.only):
        settings = {key: getattr(options, key) for key in ("seconds", "every", "batch_size")}
        result = {"machine": describe_machine(), "settings": settings, "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nkept in {RESULTS.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
