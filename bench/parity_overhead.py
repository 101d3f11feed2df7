"""Steps per second with parity at every step, and without.

    python bench/parity_overhead.py [--rounds 12] [--turn-steps 25] [--tiny]

Two jobs of four workers train the same model (``kaggle``, batch 2,048) on this machine, in turns:
without parity, and with ``Worker(parity=Parity(group_size=4))``. A ratio is made of turns of one
round. Traffic is what loopback carried more than without parity, memory what the workers hold more;
both next to the formulas. Keeps bench/results/parity_overhead.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from paired import paired_ratio, spread
from parity_worker import build_model, sizes_of
from results import keep

from cpr_ext.wings.lab.dlrm.presets import find_preset
from cpr_ext.wings.lab.dlrm.synthetic import Synthetic
from cpr_ext.wings.policy.parity import extra_memory_share

HERE = Path(__file__).resolve().parent
WAYS = ("none", "parity")
WORKERS = 4  # 2 with --tiny
WARM_TURNS = 2  # of each job
START_SECONDS = 240
NUM_BATCHES, NUM_DENSE = 32, 13
KEPT_DELTAS, KEPT_COPIES = 5, 3  # of steps, and of the dense part, see docs/distributed.md


class TrainingJob:
    """The workers of one way, which train when they are let."""

    def __init__(self, way: str, settings: dict[str, Any], folder: Path) -> None:
        self.way = way
        self._workers = settings["workers"]
        self._turn_steps = settings["turn_steps"]
        self._folder = folder / way
        self._folder.mkdir()
        self._allowed = 0
        self._allow(0)
        program = [str(HERE / "parity_worker.py"), json.dumps({**settings, "way": way})]
        command = [
            sys.executable,
            "-m",
            "cpr_ext.wings.cli",
            "launch",
            "--nproc",
            str(self._workers),
        ]
        command += ["--spares", "0", "--max-restarts", "0", *program, str(self._folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._log = (self._folder / "log").open("wb")
        self._process = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def _allow(self, steps: int) -> None:
        temporary = self._folder / "allowed.new"
        temporary.write_text(str(steps))
        temporary.replace(self._folder / "allowed")

    def reached(self, timeout_seconds: float = START_SECONDS) -> list[dict[str, Any]]:
        """Each worker's line on the end of the newest turn, once all are there."""
        until = time.monotonic() + timeout_seconds
        while True:
            lines = [self._last_line(rank) for rank in range(self._workers)]
            if all(line is not None and line["step"] == self._allowed for line in lines):
                return [line for line in lines if line is not None]
            if self._process.poll() is not None or time.monotonic() > until:
                log = (self._folder / "log").read_text(errors="replace")
                raise SystemExit(f"{self.way}: the workers did not get there\n{log[-4000:]}")
            time.sleep(0.002)

    def _last_line(self, rank: int) -> dict[str, Any] | None:
        path = self._folder / f"journal-{rank}"
        text = path.read_text() if path.exists() else ""
        lines = text.split("\n")[:-1]
        return json.loads(lines[-1]) if lines else None

    def turn(self) -> dict[str, Any]:
        """Train some steps: seconds, bytes over loopback, and what each worker used."""
        before, sent, begun = self.reached(), loopback_bytes(), time.time()
        self._allowed += self._turn_steps
        self._allow(self._allowed)
        after = self.reached()
        seconds = max(line["time"] for line in after) - begun
        names = ("training_cpu", "parity_cpu", "process_cpu")
        spent = {
            name: sum(
                a.get(name, 0.0) - b.get(name, 0.0) for a, b in zip(after, before, strict=True)
            )
            for name in names
        }
        return {
            "seconds": seconds,
            "bytes": loopback_bytes() - sent,
            "memory_bytes": sum(line["memory_bytes"] for line in after),
            **spent,
        }

    def stop(self) -> None:
        """End the workers: nothing is saved."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def loopback_bytes() -> int:
    """Sent over loopback until now, by everybody."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise SystemExit("there is no loopback device")


def make_batches(settings: dict[str, Any]) -> float:
    """Write the batches for all workers; returns the rows that a step changes, the mean."""
    sizes = sizes_of(settings["preset"], settings["workers"])
    size = settings["batch_size"]
    source = Synthetic(sizes, num_samples=NUM_BATCHES * size, num_dense=NUM_DENSE)
    batches = list(source.train_batches(size))
    plain = [(one.dense, one.indices, one.offsets, one.labels) for one in batches]
    torch.save(plain, settings["batches"])
    rows = [sum(ids.unique().numel() for ids in one.indices) for one in batches]
    return statistics.mean(rows)


def measure(settings: dict[str, Any], rounds: int, folder: Path) -> dict[str, list[Any]]:
    """Turns of each way, round by round."""
    jobs: list[TrainingJob] = []
    turns: dict[str, list[Any]] = {way: [] for way in WAYS}
    try:
        for way in WAYS:  # one after the other: building takes both cores
            jobs.append(TrainingJob(way, settings, folder))
            jobs[-1].reached()
        for _ in range(WARM_TURNS):
            for job in jobs:
                job.turn()
        chance = random.Random(0)
        for number in range(rounds):
            for job in chance.sample(jobs, len(jobs)):
                turns[job.way].append(job.turn())
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    finally:
        for job in jobs:
            job.stop()
    return turns


def describe(
    turns: dict[str, list[Any]], settings: dict[str, Any], rows: float
) -> list[dict[str, Any]]:
    """One row for each way; ratios are medians over rounds."""
    steps, none = settings["turn_steps"], turns["none"]
    found = []
    for way in WAYS:
        own = turns[way]
        seconds = [turn["seconds"] for turn in own]
        row: dict[str, Any] = {
            "way": way,
            "steps_per_second": steps / statistics.median(seconds),
            "iqr_seconds_per_step": spread(seconds) / steps,
        }
        if way != "none":
            row["ratio_to_none"] = paired_ratio([turn["seconds"] for turn in none], seconds)
            more = [a["bytes"] - b["bytes"] for a, b in zip(own, none, strict=True)]
            row["bytes_per_step"] = statistics.median(more) / steps
            row["memory_bytes"] = statistics.median(
                a["memory_bytes"] - b["memory_bytes"] for a, b in zip(own, none, strict=True)
            )
        for name in ("training_cpu", "parity_cpu", "process_cpu"):
            each = statistics.median(turn[name] for turn in own) / steps / settings["workers"]
            row[f"{name}_seconds"] = each
        found.append(row)
    return found


def formulas(settings: dict[str, Any], rows: float) -> dict[str, float]:
    """What the policy expects of traffic and memory; rows are whole words of 8 bytes."""
    sizes = sizes_of(settings["preset"], settings["workers"])
    row_bytes = 8 * math.ceil((4 * find_preset(settings["preset"]).embedding_dim + 4) / 8)
    table_bytes = sum(sizes) * row_bytes
    step_bytes = rows * (row_bytes + 8)  # with 8 of row id
    return {
        "rows_per_step": rows,
        "row_bytes": row_bytes,
        "table_bytes": table_bytes,
        "bytes_per_step": step_bytes,
        "memory_bytes": table_bytes * extra_memory_share(settings["group_size"])
        + KEPT_DELTAS * step_bytes
        + KEPT_COPIES * settings["workers"] * dense_bytes(settings),
    }


def dense_bytes(settings: dict[str, Any]) -> int:
    """Parameters outside tables, and as much of their optimizer's state."""
    model = build_model(settings, [1] * len(sizes_of(settings["preset"], settings["workers"])))
    tables = sum(parameter.numel() for parameter in model.tables.parameters())
    return 8 * (sum(parameter.numel() for parameter in model.parameters()) - tables)


def show(rows: list[dict[str, Any]], expected: dict[str, float]) -> None:
    print(f"{'':8}{'steps/s':>9}{'to none':>9}{'MB/step':>9}{'memory, MB':>12}")
    for row in rows:
        ratio, moved, memory = (
            f"{row[name] * factor:.3f}" if name in row else "-"
            for name, factor in (
                ("ratio_to_none", 1),
                ("bytes_per_step", 1e-6),
                ("memory_bytes", 1e-6),
            )
        )
        print(f"{row['way']:8}{row['steps_per_second']:>9.3f}{ratio:>9}{moved:>9}{memory:>12}")
    print(
        f"{'formula':26}{expected['bytes_per_step'] / 1e6:>9.3f}"
        f"{expected['memory_bytes'] / 1e6:>12.3f}"
    )
    print("\nseconds of the processor per step and worker, milliseconds")
    for row in rows:
        parts = ("training_cpu", "parity_cpu", "process_cpu")
        cells = (f"{part} {1e3 * row[f'{part}_seconds']:.2f}" for part in parts)
        print(f"{row['way']:8}{', '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--turn-steps", type=int, default=25)
    parser.add_argument("--folder", type=Path, help="for batches and journals")
    parser.add_argument("--tiny", action="store_true", help="small and quick; keeps nothing")
    options = parser.parse_args()
    if options.tiny:
        options.rounds, options.turn_steps = 2, 3
    folder = Path(tempfile.mkdtemp(prefix="parity-", dir=options.folder))
    settings = {
        "preset": "tiny" if options.tiny else "kaggle",
        "batch_size": 64 if options.tiny else 2048,
        "workers": (workers := 2 if options.tiny else WORKERS),
        "group_size": workers,
        "num_dense": NUM_DENSE,
        "turn_steps": options.turn_steps,
        "num_steps": options.turn_steps * (options.rounds + WARM_TURNS + 1),
        "batches": str(folder / "batches"),
    }
    try:
        rows = make_batches(settings)
        turns = measure(settings, options.rounds, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found, expected = describe(turns, settings, rows), formulas(settings, rows)
    show(found, expected)
    if not options.tiny:
        del settings["batches"]
        keep("parity_overhead", found, settings=settings, formulas=expected, turns=turns)


if __name__ == "__main__":
    main()
