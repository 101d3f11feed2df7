"""Saving a whole model once: ours and what one could use instead, behind a training run.

    python bench/peers.py [--rounds 3] [--tiny] [--only NAME]

Each saver, used as its documentation recommends, saves all tables, optimizer state and dense
parameters of a DLRM (`kaggle`, 2.3 GB) that trains on at batch 2048 wherever the saver lets it. In
a process of its own per saver: how long training is held, when the save is durable (where a library
does not sync, the benchmark does), how far memory rises above training's, and the bytes on disk.
Keeps bench/results/peers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import savers
from bench_storage import sync
from results import keep, parser_of
from tqdm import tqdm
from training import PeakMemory, Protected, Run, in_own_process

from cpr_ext.saving.slot_size import DEFAULT_SLOT_BYTES

HERE = Path(__file__).resolve().parent
OURS = "cpr_ext"
PEERS = {saver.name: saver for saver in savers.PEERS}
NUM_SLOTS = 2


def save_ours(run: Run, folder: Path) -> dict[str, Any]:
    """A base snapshot by a new Checkpointer."""
    memory = PeakMemory()
    started, first = time.perf_counter(), run.number
    protected = Protected(run, folder / "store")
    made_seconds = time.perf_counter() - started
    started = time.perf_counter()
    protected.train_until_saved()
    durable_seconds = time.perf_counter() - started
    found = {
        "held_seconds": protected.metrics.stall_seconds,
        "longest_pause_seconds": protected.metrics.max_stall_seconds,
        "durable_seconds": durable_seconds,
        "made_seconds": made_seconds,
        "steps_meanwhile": run.number - first,
        "peak_memory_bytes": memory.rise_bytes(),
    }
    protected.close()
    return found


def save_peer(run: Run, folder: Path, name: str) -> dict[str, Any]:
    saver = PEERS[name](folder, run.state(), new_paths=False)
    memory = PeakMemory()
    started = time.perf_counter()
    wait = saver.begin(1)
    held_seconds = time.perf_counter() - started
    first = run.number

    def finish() -> None:
        wait()
        sync(folder)

    waiting = threading.Thread(target=finish)
    waiting.start()
    while waiting.is_alive():
        run.train_step()
    return {
        "held_seconds": held_seconds,
        "longest_pause_seconds": held_seconds,
        "durable_seconds": time.perf_counter() - started,
        "made_seconds": 0.0,
        "steps_meanwhile": run.number - first,
        "peak_memory_bytes": memory.rise_bytes(),
    }


def child(options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")  # of savers about their futures
    run = Run(tiny=options.tiny, batch_size=2048)
    found = []
    for number in range(options.rounds):
        folder = Path(options.child_folder) / str(number)
        folder.mkdir()
        if options.child == OURS:
            one = save_ours(run, folder)
        else:
            one = save_peer(run, folder, options.child)
        one["bytes_on_disk"] = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        found.append(one)
        shutil.rmtree(folder)
        os.sync()  # the deletion is not the next round's work
    row = {key: statistics.median(one[key] for one in found) for key in found[0]}
    row["held_seconds_of_each_round"] = [one["held_seconds"] for one in found]
    row["durable_seconds_of_each_round"] = [one["durable_seconds"] for one in found]
    row["model_bytes"] = sum(tensor.nbytes for tensor in run.state().values())
    row["num_rows"] = run.num_rows
    print(json.dumps(row))


def allowed_memory_bytes(num_rows: int) -> int:
    """What a base snapshot may take over the tables: slots, 7 bytes per row and 64 MB."""
    # Counts have four bytes of a row, its hash two; the rest is for bits of rows.
    return NUM_SLOTS * DEFAULT_SLOT_BYTES + 7 * num_rows + 64_000_000


def print_table(rows: list[dict[str, Any]]) -> None:
    head = ("held", "longest pause", "durable", "memory", "on disk")
    print(f"\n{'':<44}" + "".join(f"{name:>15}" for name in head))
    for row in rows:
        print(
            f"{row['name']:<44}{row['held_seconds']:>13.3f} s"
            f"{1e3 * row['longest_pause_seconds']:>12.1f} ms{row['durable_seconds']:>13.2f} s"
            f"{row['peak_memory_bytes'] / 1e6:>12.0f} MB{row['bytes_on_disk'] / 1e6:>12.0f} MB"
        )


def main() -> None:
    parser = parser_of(__doc__, has_children=True)
    parser.add_argument("--rounds", type=int, default=3, help="saves by each")
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    names = [name for name in (OURS, *PEERS) if options.only in name]
    arguments = ["--rounds", str(options.rounds), *["--tiny"] * options.tiny]
    rows = [
        {"name": name, **in_own_process(__file__, name, *arguments, folder=options.folder)}
        for name in tqdm(names, unit="saver", disable=None)
    ]
    print_table(rows)
    if not (options.tiny or options.only):
        keep("peers", rows, rounds=options.rounds)


if __name__ == "__main__":
    main()
