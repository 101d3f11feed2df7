"""How often parity does not suffice, by simulation, and what it costs; kept as JSON, drawn.

    python bench/parity_reliability.py [--tiny]

For jobs of 8 to 4,096 workers over a month: the chance that two workers of a group are lost before
the first is rebuilt, for a mirror, 3 + 1 and 7 + 1, played loss by loss next to the formula; the
traffic of a link; the rebuild time. And the number of workers from which each falls back too often.
The node, its tables and the network are assumed (``ASSUMED``), and kept with the results.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from results import keep

from cpr_ext.wings.lab.emulation.parity_groups import PlayedGroups
from cpr_ext.wings.policy import JobSize, ParityCosts
from cpr_ext.wings.policy.parity import (
    MONTH_HOURS,
    chance_of_fallback,
    extra_memory_share,
    rebuild_hours,
)

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "parity_reliability.png"
NAME = "parity_reliability"
WORKERS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GROUP_SIZES = (2, 4, 8)
FEWEST_HISTORIES, MOST_HISTORIES = 2000, 200_000
FAILURES = 1_000_000  # to play of each job, where the histories allow
# The limits for which the largest job is sought: chance that parity does not suffice in a month.
LIMITS = (0.01, 0.1)
ASSUMED: dict[str, float] = {
    "node_mtbf_hours": 2000,
    "replace_minutes": 3,  # until the replacement has started
    "shard_bytes": 40e9,  # of a worker, with optimizer state
    "link_bytes_per_second": 1e9,
    "rows_per_step_and_worker": 7000,  # different rows; 450,000 on 64 workers (Terabyte)
    "row_bytes": 260,  # dim 64 and a row-wise sum
    "step_seconds": 0.065,
}


def histories_of(workers: int) -> int:
    """More histories where failures are rare."""
    failures = MONTH_HOURS * workers / ASSUMED["node_mtbf_hours"]
    return min(MOST_HISTORIES, max(FEWEST_HISTORIES, int(FAILURES / failures)))


def play(workers: int, size: int, mtbf: float, window: float, histories: int) -> Any:
    """Losses that parity does not make good in a month, of each history; loss by loss."""
    rng = np.random.default_rng(workers * 10 + size)
    fallbacks = np.zeros(histories)
    for history in range(histories):
        groups = PlayedGroups(size, window)
        count = rng.poisson(MONTH_HOURS / mtbf)
        hours = np.sort(rng.uniform(0, MONTH_HOURS, count)).tolist()
        shards = rng.integers(workers, size=count).tolist()
        lost = zip(hours, shards, strict=True)
        fallbacks[history] = sum(bool(groups.lose(hour, [shard])) for hour, shard in lost)
    return fallbacks


def row(workers: int, size: int, assumed: dict[str, float], histories: int) -> dict[str, Any]:
    """One job: formula, simulation and costs."""
    mtbf = assumed["node_mtbf_hours"] / workers
    link = assumed["link_bytes_per_second"]
    rebuild = rebuild_hours(assumed["shard_bytes"], size, link)
    window = assumed["replace_minutes"] / 60 + rebuild
    fallbacks = play(workers, size, mtbf, window, histories)
    fell_back = (fallbacks > 0).astype(float)
    # A changed row with 8 bytes of id.
    each = assumed["rows_per_step_and_worker"] * (assumed["row_bytes"] + 8)
    return {
        "workers": workers,
        "group_size": size,
        "name": ParityCosts(size, 0.0, rebuild).name,
        "job_mtbf_hours": mtbf,
        "rebuild_minutes": 60 * rebuild,
        "unprotected_minutes": 60 * window,
        "extra_memory_share": extra_memory_share(size),
        "link_bytes_per_second": each / assumed["step_seconds"],
        "link_share": each / link / assumed["step_seconds"],
        "chance": chance_of_fallback(JobSize(MONTH_HOURS, workers), mtbf, size, window),
        "simulated_chance": float(fell_back.mean()),
        "standard_error": float(fell_back.std(ddof=1) / np.sqrt(histories)),
        "simulated_fallbacks": float(fallbacks.mean()),
        "histories": histories,
    }


def largest_job(size: int, limit: float, assumed: dict[str, float]) -> int:
    """Most workers whose chance in a month stays below a limit, by the formula."""
    window = assumed["replace_minutes"] / 60
    window += rebuild_hours(assumed["shard_bytes"], size, assumed["link_bytes_per_second"])

    def is_below(groups: int) -> bool:
        workers = size * groups
        mtbf = assumed["node_mtbf_hours"] / workers
        return chance_of_fallback(JobSize(MONTH_HOURS, workers), mtbf, size, window) < limit

    low, high = 0, 1
    while is_below(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return size * low


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'workers':>8}{'group':>8}{'formula':>10}{'simulated':>18}{'rebuild':>10}{'link':>12}")
    for one in rows:
        simulated = f"{100 * one['simulated_chance']:.2f} +- {100 * one['standard_error']:.2f} %"
        print(
            f"{one['workers']:>8}{one['name']:>8}{100 * one['chance']:>8.2f} %{simulated:>18}"
            f"{one['rebuild_minutes']:>6.2f} min{one['link_bytes_per_second'] / 1e6:>7.1f} MB/s"
        )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The chance over the number of workers; lines are the formula, points the simulation."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
    for size, color in zip(GROUP_SIZES, ("#0072b2", "#009e73", "#d55e00"), strict=True):
        own = [one for one in rows if one["group_size"] == size]
        workers = [one["workers"] for one in own]
        label = f"{own[0]['name']}: +{100 * own[0]['extra_memory_share']:.0f} % memory"
        axes.plot(workers, [100 * one["chance"] for one in own], color=color, lw=2, label=label)
        played = [one for one in own if one["simulated_chance"] > 0]
        axes.errorbar(
            [one["workers"] for one in played],
            [100 * one["simulated_chance"] for one in played],
            [200 * one["standard_error"] for one in played],
            fmt="o", color=color, ms=4, lw=1, capsize=2,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(WORKERS), [f"{one:,}" for one in WORKERS])
    axes.set_ylim(0.01, 100)
    ticks = (0.01, 0.1, 1, 10, 100)
    axes.set_yticks(ticks, [f"{tick:g} %" for tick in ticks])
    axes.set_xlabel("workers")
    axes.set_ylabel("chance in a month that parity does not suffice")
    axes.axhline(1, color="#777777", lw=0.8, ls="--")
    axes.legend(frameon=False, loc="upper left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small and quick; keeps nothing")
    tiny = parser.parse_args().tiny
    rows = [
        row(count, size, ASSUMED, 20 if tiny else histories_of(count))
        for count in ((8, 64) if tiny else WORKERS)
        for size in GROUP_SIZES
    ]
    show(rows)
    limits = {
        f"{100 * limit:g} %": {
            rows[number]["name"]: largest_job(size, limit, ASSUMED)
            for number, size in enumerate(GROUP_SIZES)
        }
        for limit in LIMITS
    }
    print(f"largest jobs whose chance in a month is below a limit: {limits}")
    if not tiny:
        keep(NAME, rows, assumed=ASSUMED, month_hours=MONTH_HOURS, largest_jobs=limits)
        draw(rows, PICTURE)


if __name__ == "__main__":
    main()
