"""From SIGKILL to the next trained step: live partial recovery, and the usual restart.

    python bench/recovery_time.py [--gigabytes 2] [--workers 4] [--kills 3] [--folder DIR] [--tiny]

Both ways train the same model, its rows sharded over the workers, on this machine over loopback,
and lose the same worker as often. Ours: ``cpr launch``'s supervisor, partial snapshots. The usual
way: torchrun restarts all workers, and all load a torch.distributed.checkpoint. Prints the parts of
each loss; keeps bench/results/recovery_time.json and docs/images/recovery_time.png.
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
from pathlib import Path
from typing import Any

from cpr_ext.distributed.launcher import Launcher

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "recovery_time.json"
PICTURE = HERE.parent / "docs" / "images" / "recovery_time.png"
WORKER = HERE / "recovery_worker.py"
STEPS_BETWEEN_KILLS = 120
WAYS = ("ours", "usual")


def run(way: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One job, killed ``settings["kills"]`` times; what happened when."""
    command = [str(WORKER), way, json.dumps(settings), str(folder)]
    begun = time.time()
    if way == "ours":
        launcher = Launcher([sys.executable, *command], settings["workers"], tell=note)
        thread = threading.Thread(target=kill_again_and_again, args=(way, settings, folder))
        thread.start()
        code = launcher.run()
        thread.join()
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += [f"--nproc-per-node={settings['workers']}"]
        torchrun += [f"--max-restarts={settings['kills']}", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(torchrun, env=environment) as process:
            kill_again_and_again(way, settings, folder)
            code = process.wait()
    if code != 0:
        raise SystemExit(f"{way}: the job ended with code {code}")
    kills = json.loads((folder / f"{way}-kills").read_text())
    events = [read_journal(folder / f"{way}-{rank}") for rank in range(settings["workers"])]
    return {
        "kills": [kill["time"] - begun for kill in kills],
        "losses": [describe_loss(way, kill, events) for kill in kills],
        "steps": [e["time"] - begun for e in events[0] if e["event"] == "step"],
    }


def note(text: str) -> None:
    print(f"  {text}", file=sys.stderr)


def kill_again_and_again(way: str, settings: dict[str, Any], folder: Path) -> None:
    """Kill the second last worker each time that the job has trained some more steps."""
    rank, kills = settings["workers"] - 2, []
    journal = folder / f"{way}-{rank}"
    for _ in range(settings["kills"]):
        since = kills[-1]["time"] if kills else 0.0
        wanted = settings["steps_between_kills"]
        while True:
            steps = [e for e in read_journal(journal) if e["event"] == "step"]
            steps = [e for e in steps if e["time"] > since]
            if len(steps) >= wanted:
                break
            time.sleep(0.05)
        kills.append({"time": time.time(), "pid": steps[-1]["pid"], "rank": rank})
        os.kill(steps[-1]["pid"], signal.SIGKILL)
    (folder / f"{way}-kills").write_text(json.dumps(kills))


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
    replaced = [kill["rank"]] if way == "ours" else list(ranks)
    started = min(first(rank, "started") for rank in replaced)
    ready = max(first(rank, "ready") for rank in replaced)
    recovered = max(first(rank, "recovered") for rank in ranks)
    # Of all: nobody trains before the slowest does.
    stepped = max(
        min(e["time"] for e in events[r] if e["event"] == "step" and e["time"] > recovered)
        for r in ranks
    )
    loss = {"total": stepped - at, "start_up": ready - started, "first_step": stepped - recovered}
    if way == "ours":
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
    return loss


def medians(losses: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(loss[name] for loss in losses) for name in losses[0]}


def print_table(results: dict[str, Any]) -> None:
    ours, usual = (medians(results[way]["losses"]) for way in WAYS)
    size = results["settings"]["table_bytes"] / 1e9
    workers, kills = results["settings"]["workers"], results["settings"]["kills"]
    print(f"\n{workers} workers, {size:g} GB of tables, medians of {kills} kills, seconds\n")
    print(f"{'':<46}{'ours':>8}{'usual':>8}")
    for name, text in (
        ("detection", "until the last survivor noticed"),
        ("supervisor", "until the replacement's process, or all, began"),
        ("start_up", "start-up: Python, imports, building the model"),
        ("rendezvous", "rendezvous"),
        ("load", "load, and the dense part"),
        ("first_step", "first step"),
        ("total", "SIGKILL to the next trained step"),
        ("without_start_up", "the same without start-up"),
    ):
        cells = [f"{way[name]:>8.2f}" if name in way else f"{'-':>8}" for way in (ours, usual)]
        print(f"{text:<46}{''.join(cells)}")
    print("\ntargets")
    took = ours["without_start_up"]
    print(f"  at most 3 s without start-up: {took:.2f} s, {'met' if took <= 3 else 'missed'}")
    ratio = usual["total"] / ours["total"]
    bare = usual["without_start_up"] / ours["without_start_up"]
    print(f"  usual restart at least 5x slower: {ratio:.1f}x, {'met' if ratio >= 5 else 'missed'}")
    print(f"  (both without start-up: {bare:.1f}x)")


def draw(results: dict[str, Any], path: Path) -> None:
    """Throughput over time, the kills marked."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(9, 5), layout="constrained")
    titles = {
        "ours": "live partial recovery (cpr launch)",
        "usual": "all restart and load (torchrun, torch.distributed.checkpoint)",
    }
    for axis, way in zip(axes, WAYS, strict=True):
        steps = results[way]["steps"]
        seconds = range(int(steps[-1]) + 1)
        rates = [sum(second <= step < second + 1 for step in steps) for second in seconds]
        axis.fill_between(seconds, rates, step="post", color="#4878a8", alpha=0.8)
        for number, kill in enumerate(results[way]["kills"]):
            label = "SIGKILL of one worker" if number == 0 else None
            axis.axvline(kill, color="#c03028", linewidth=1.2, label=label)
        axis.set_title(titles[way], loc="left", fontsize=10)
        axis.set_ylabel("steps per second")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, loc="upper right")
    axes[1].set_xlabel("seconds since the start")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gigabytes", type=float, default=2.0, help="tables, all workers' together"
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    parser.add_argument("--tiny", action="store_true", help="small and quick; keeps nothing")
    options = parser.parse_args()
    if options.tiny:
        options.gigabytes, options.workers, options.kills = 0.001, 2, 1
    between = 20 if options.tiny else STEPS_BETWEEN_KILLS
    settings = {
        "table_bytes": int(options.gigabytes * 1e9),
        "workers": options.workers,
        "batch_size": 128,
        "kills": options.kills,
        "steps_between_kills": between,
        "checkpoint_step": between // 2,
        "every_steps": between // 4,
        "num_steps": between * (options.kills + 1),
    }
    results: dict[str, Any] = {"settings": settings}
    for way in WAYS:
        folder = Path(tempfile.mkdtemp(prefix=f"recovery-{way}-", dir=options.folder))
        try:
            results[way] = run(way, settings, folder)
        finally:
            shutil.rmtree(folder)
    print_table(results)
    if not options.tiny:
        from cpr_ext.emulation.machine import describe_machine

        results["machine"] = describe_machine()
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        draw(results, PICTURE)
        print(f"\nkept in {RESULTS.relative_to(HERE.parent)}; picture: {PICTURE.name}")


if __name__ == "__main__":
    main()
