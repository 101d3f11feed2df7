"""From SIGKILL to the next trained step: live partial recovery, and the usual restart.

    python bench/recovery_time.py [--gigabytes 2] [--workers 4] [--kills 3] [--only WAYS] [--tiny]
    python bench/recovery_time.py --speed [--gigabytes 2] [--rate 10] [--kills 3]

All ways train the same model, its rows sharded over the workers, on this machine over loopback,
and lose the same worker as often. ``spare``: under ``cpr launch``, partial snapshots; ``live``: the
same with ``--spares 0``; ``exact``: like ``spare``, with parity in peers' memory and
``recovery="exact"``; ``mirror``: the same in groups of two; ``larger``: ``exact`` with tables four
times as large; ``usual``: torchrun restarts all workers, and all load a
torch.distributed.checkpoint. Prints the parts of each loss; keeps
bench/results/recovery_time.json (``--only`` measures one way anew).
``--speed`` measures ``exact`` with kills so far apart that the group is protected again, and keeps
bench/results/rebuild_speed.json: steps/s while rows are rebuilt during training.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from results import keep

from cpr_ext.wings.lab.emulation.machine import describe_machine

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "recovery_time.json"
WORKER = HERE / "recovery_worker.py"
# Losses are farther apart than the start of a spare takes.
STEPS_BETWEEN_KILLS = 400
WAYS = ("spare", "live", "exact", "mirror", "larger", "usual")
TINY_WAYS = ("live", "exact", "usual")
GROUP_SIZES = {"exact": 4, "mirror": 2, "larger": 4}
LARGER = 4
AROUND_SECONDS = 10.0  # before a kill, in which steps are counted
# Of --speed, to choose how far kills are apart.
STEPS_PER_SECOND = 28.0
REBUILT_PER_SHARD = 1.7
PARTS = {
    "detection": "until the last survivor noticed",
    "supervisor": "until the replacement, or all, began",
    "start_up": "start-up: Python, imports, building the model",
    "rendezvous": "rendezvous",
    "load": "load, and the dense part",
    "first_step": "first step",
    "total": "SIGKILL to the next trained step",
    "without_start_up": "the same without start-up",
    "caught_up": "until training reaches the step of the kill again",
    "protected": "until the group is protected again",
    "speed_before": "steps/s before the kill",
    "speed": "steps/s meanwhile, to those before the kill",
}


def run(way: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One job, killed ``settings["kills"]`` times; what happened when."""
    kind = "usual" if way == "usual" else "live"
    settings = settings_of(way, settings)
    command = [str(WORKER), kind, json.dumps(settings), str(folder)]
    killer = threading.Thread(target=kill_again_and_again, args=(settings, folder), daemon=True)
    killer.start()
    if way == "usual":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += [f"--nproc-per-node={settings['workers']}"]
        torchrun += [f"--max-restarts={settings['kills']}", *command]
        with (folder / "log").open("wb") as log:
            # Without the last, torch 2.13's second attempt finds the addresses of the first.
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            }
            code = subprocess.call(torchrun, env=environment, stdout=log, stderr=log)
    else:
        launch = ["launch", "--nproc", str(settings["workers"])]
        launch += ["--spares", str(settings["spares"]), *command]
        code = subprocess.call([sys.executable, "-m", "cpr_ext.wings.cli", *launch])
    if code != 0:
        raise SystemExit(f"{way}: the job ended with code {code}")
    killer.join()
    kills = json.loads((folder / "kills").read_text())
    events = [read_journal(folder / f"journal-{rank}") for rank in range(settings["workers"])]
    return {"losses": [describe_loss(way, kill, events) for kill in kills]}


def settings_of(way: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What the workers of one way are told."""
    factor = LARGER if way == "larger" else 1
    size = GROUP_SIZES.get(way)
    return {
        **settings,
        "spares": 0 if way == "live" else 1,
        "table_bytes": factor * settings["table_bytes"],
        "group_size": None if size is None else min(size, settings["workers"]),
    }


def kill_again_and_again(settings: dict[str, Any], folder: Path) -> None:
    """Kill the second last worker each time that the job has trained some more steps."""
    rank, kills = settings["workers"] - 2, []
    journal = folder / f"journal-{rank}"
    for _ in range(settings["kills"]):
        since = kills[-1]["time"] if kills else 0.0
        wanted = settings["steps_between_kills"]
        while True:
            steps = [e for e in read_journal(journal) if e["event"] == "step"]
            steps = [e for e in steps if e["time"] > since]
            if len(steps) >= wanted:
                break
            time.sleep(0.05)
        while not is_protected_long_enough(read_journal(journal), since, settings):
            time.sleep(0.05)
        steps = [e for e in read_journal(journal) if e["event"] == "step"]
        kills.append({"time": time.time(), "pid": steps[-1]["pid"], "rank": rank})
        os.kill(steps[-1]["pid"], signal.SIGKILL)
    (folder / "kills").write_text(json.dumps(kills))


def is_protected_long_enough(
    events: list[dict[str, Any]], since: float, settings: dict[str, Any]
) -> bool:
    """Whether the group has been protected for as long before this kill as is measured."""
    if not settings["protected_seconds"]:
        return True
    times = [e["time"] for e in events if e["event"] == "protected" and e["time"] > since]
    return bool(times) and time.time() > max(times) + settings["protected_seconds"]


def read_journal(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def describe_loss(way: str, kill: dict[str, Any], events: list[list[dict[str, Any]]]) -> Any:
    """Seconds from the kill to the next step of all workers, and its parts.

    ``start_up`` is that of the replaced process, or of the slowest, until its model is built.
    """
    at = kill["time"]

    def first(rank: int, kind: str) -> float:
        times = [e["time"] for e in events[rank] if e["event"] == kind and e["time"] > at]
        return min(times)

    ranks = range(len(events))
    replaced = list(ranks) if way == "usual" else [kill["rank"]]
    started = min(first(rank, "started") for rank in replaced)
    ready = max(first(rank, "ready") for rank in replaced)
    recovered = max(first(rank, "recovered") for rank in ranks)
    # Of all: nobody trains before the slowest does.
    steps = [[e for e in journal if e["event"] == "step"] for journal in events]
    again = [[e for e in of_rank if e["time"] > recovered] for of_rank in steps]
    stepped = max(first_step_behind(0, of_rank) for of_rank in again)
    loss = {"total": stepped - at, "start_up": ready - started, "first_step": stepped - recovered}
    if way != "usual":
        others = [rank for rank in ranks if rank != kill["rank"]]
        joined = max(first(rank, "joined") for rank in ranks)
        loss["detection"] = max(first(rank, "peer_lost") for rank in others) - at
        loss["supervisor"] = started - at
        loss["rendezvous"] = joined - ready
        loss["load"] = recovered - joined
    else:
        loss["supervisor"] = started - at
        loss["load"] = recovered - ready
    loss["without_start_up"] = loss["total"] - loss["start_up"]
    furthest = max(e["step"] for of_rank in steps for e in of_rank if e["time"] <= recovered)
    loss["caught_up"] = max(first_step_behind(furthest, of_rank) for of_rank in again) - at
    if (protected := first_after(events[0], "protected", stepped)) is not None:
        loss["protected"] = protected - at
        known = [e["time"] for e in events[0] if e["event"] == "protected" and e["time"] < at]
        begin = max(at - AROUND_SECONDS, *known)
        loss["speed_before"] = rate(steps[0], begin, at)
        loss["speed"] = rate(steps[0], stepped, protected) / loss["speed_before"]
    return loss


def first_after(journal: list[dict[str, Any]], kind: str, moment: float) -> float | None:
    return min(
        (e["time"] for e in journal if e["event"] == kind and e["time"] > moment), default=None
    )


def rate(steps: list[dict[str, Any]], begin: float, end: float) -> float:
    """Steps per second between two moments."""
    return sum(begin < e["time"] <= end for e in steps) / (end - begin)


def first_step_behind(step: int, steps: list[dict[str, Any]]) -> float:
    return min(e["time"] for e in steps if e["step"] > step)


def medians(losses: list[dict[str, float]]) -> dict[str, float]:
    names = {name for loss in losses for name in loss}
    return {
        name: statistics.median(loss[name] for loss in losses if name in loss) for name in names
    }


def print_table(results: dict[str, Any]) -> None:
    found = {way: medians(results[way]["losses"]) for way in WAYS if way in results}
    size = results["settings"]["table_bytes"] / 1e9
    workers, kills = results["settings"]["workers"], results["settings"]["kills"]
    print(f"\n{workers} workers, {size:g} GB of tables, medians of {kills} kills, seconds\n")
    print(f"{'':<46}" + "".join(f"{way:>8}" for way in found))
    for part, text in PARTS.items():
        cells = [f"{way[part]:>8.2f}" if part in way else f"{'-':>8}" for way in found.values()]
        print(f"{text:<46}{''.join(cells)}")
    print("\ntargets")
    for target, is_met in targets(found):
        print(f"  {target}, {'met' if is_met else 'missed'}")


def targets(found: dict[str, dict[str, float]]) -> Iterator[tuple[str, bool]]:
    """What was promised, measured; and whether it is so."""
    for way in ("spare", "live"):
        if way in found:
            took = found[way]["without_start_up"]
            yield f"{way}: at most 3 s without start-up: {took:.2f} s", took <= 3
        if {way, "usual"} <= found.keys():
            ratio = found["usual"]["total"] / found[way]["total"]
            yield f"{way}: the usual restart at least 5x slower: {ratio:.1f}x", ratio >= 5
    if {"exact", "usual"} <= found.keys():
        ratio = found["usual"]["caught_up"] / found["exact"]["caught_up"]
        yield f"exact: the usual restart at least 12x slower to catch up: {ratio:.1f}x", ratio >= 12
    for way in ("exact", "mirror", "larger"):
        if "speed" in found.get(way, {}):
            speed = found[way]["speed"]
            yield f"{way}: at least 0.93 of the steps/s at a rebuild: {speed:.3f}", speed >= 0.93
    if {"exact", "larger"} <= found.keys():
        ratio = found["larger"]["total"] / found["exact"]["total"]
        yield f"larger: at most 1.1x of exact to the next step: {ratio:.2f}x", ratio <= 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="tables, of all workers")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument(
        "--only", choices=WAYS, nargs="+", help="measure these ways again, keep the others"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help="file to keep results in (default: %(default)s)",
    )
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    parser.add_argument("--speed", action="store_true", help="steps/s during a rebuild")
    parser.add_argument(
        "--rate", type=float, help="MB/s of a rebuild (default: 30, with --speed 10)"
    )
    parser.add_argument("--tiny", action="store_true", help="small and quick; keeps nothing")
    options = parser.parse_args()
    if options.tiny:
        options.gigabytes, options.workers, options.kills = 0.001, 2, 1
    if options.speed:
        options.only = ["exact"]
    megabytes_per_second = options.rate or (10 if options.speed else 30)
    between = 20 if options.tiny else STEPS_BETWEEN_KILLS
    saved_every = between // 8
    if options.speed and not options.tiny:
        shard_megabytes = 1000 * options.gigabytes / options.workers
        seconds = REBUILT_PER_SHARD * shard_megabytes / megabytes_per_second
        between = int(STEPS_PER_SECOND * (seconds + 1.5 * AROUND_SECONDS))
    settings = {
        "table_bytes": int(options.gigabytes * 1e9),
        "workers": options.workers,
        "batch_size": 128,
        "kills": options.kills,
        "steps_between_kills": between,
        # A loss comes in the middle between two checkpoints.
        "checkpoint_every_steps": between * 2 // 5,
        "every_steps": saved_every,
        "num_steps": between * (options.kills + 1),
        "protected_seconds": AROUND_SECONDS if options.speed and not options.tiny else 0.0,
        "rebuild_bytes_per_second": int(megabytes_per_second * 1e6),
    }
    results: dict[str, Any] = {}
    if options.only and options.results.exists() and not options.tiny and not options.speed:
        results = json.loads(options.results.read_text())
        if results["settings"] != settings:
            results = {}
    results["settings"] = settings
    for way in options.only or (TINY_WAYS if options.tiny else WAYS):
        folder = Path(tempfile.mkdtemp(prefix=f"recovery-{way}-", dir=options.folder))
        try:
            results[way] = run(way, settings, folder)
        finally:
            shutil.rmtree(folder)
    print_table(results)
    if options.speed and not options.tiny:
        keep("rebuild_speed", results["exact"]["losses"], settings=settings)
    elif not options.tiny:
        results["machine"] = describe_machine()
        options.results.write_text(json.dumps(results) + "\n")
        print(f"\nkept in {options.results}")


if __name__ == "__main__":
    main()
