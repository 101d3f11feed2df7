"""Write docs/benchmarks.md and its charts from the results in bench/results/.

python bench/page.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
IMAGES = HERE.parent / "docs" / "images"
HEAD = (
    "# Benchmarks\n\n"
    "Written by `python bench/page.py` from [bench/results/](../bench/results/); `make bench` "
    "measures anew. Ratios are of\nmedians of the same run on the same machine; a ratio above 1 is "
    "faster than the fastest peer. Absolute times are those\nof that machine and hold nowhere "
    "else.\n"
)
OURS, PEER = "#1f77b4", "#bbbbbb"


def main() -> None:
    lines = [HEAD]
    lines += training(_read("training_overhead.json"))
    lines += operations(_read("operations.json"))
    lines += [
        "What is left after a kill or a flipped bit: [reliability.md](reliability.md). How exact "
        "the planner is: [paper_map.md](paper_map.md).",
        "",
    ]
    PAGE.write_text("\n".join(lines))
    print(f"wrote {PAGE.relative_to(HERE.parent)}")


def _read(name: str) -> dict[str, Any] | None:
    path = HERE / "results" / name
    return json.loads(path.read_text()) if path.exists() else None


def _machine(machine: dict[str, Any]) -> str:
    return (
        f"{machine['date'][:10]}, commit {machine['commit']}, {machine['cores']} cores "
        f"({machine['cpu']}), torch {machine['torch']}, load average at the end "
        f"{machine['load_average_1min']:.1f}."
    )


def training(result: dict[str, Any] | None) -> Iterator[str]:
    """What saving costs training: a table and a chart."""
    if result is None:
        return
    settings, rows = result["settings"], result["rows"]
    yield "## What saving costs training\n"
    yield (
        f"DLRM with the table sizes of Criteo Kaggle (33.8 M rows, 2.3 GB with the optimizer's "
        f"state), batch {settings['batch_size']}, a save\nevery {settings['every']:g} s, "
        f"{settings['seconds']:g} s of training for each, {rows[0]['rounds']} rounds side by side. "
        "`ratio` is of samples per second to training that\nsaves nothing, the median over the "
        "rounds, and all of them. The longest pause is that of `step()` with the optimizer's "
        "hooks,\nor of the peer's call. Memory is the growth of peak RSS over training.\n"
    )
    yield "| way | samples/s | ratio | of each round | saves | longest pause | memory |"
    yield "|---|---:|---:|---|---:|---:|---:|"
    for row in rows:
        pause = f"{1e3 * row['longest_pause_seconds']:.1f} ms" if row["saves"] else "-"
        rounds = ", ".join(f"{ratio:.3f}" for ratio in row["ratios"])
        memory = f"{row['peak_memory_over_training_bytes'] / 2**20:.0f} MiB"
        yield (
            f"| {row['what']} | {row['samples_per_second']:,} | {row['ratio_to_none']:.3f} | "
            f"{rounds} | {row['saves']:.0f} | {pause} | {memory} |"
        )
    yield f"\n{_machine(result['machine'])}\n"
    saving = [row for row in rows if row["saves"]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    colors = [OURS if row["what"].startswith(("cpr_ext", "as `row`")) else PEER for row in saving]
    names = [row["mode"] for row in saving]
    left.barh(names, [row["ratio_to_none"] for row in saving], color=colors)
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set_xlabel("samples/s, of training that saves nothing")
    right.barh(names, [1e3 * row["longest_pause_seconds"] for row in saving], color=colors)
    right.set_xscale("log")
    right.set_xlabel("longest pause, ms (log scale)")
    right.set_yticklabels([])
    for axes in (left, right):
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(IMAGES / "training_overhead.png", dpi=120)
    plt.close(figure)
    yield "![Speed and longest pause of each way to save](images/training_overhead.png)\n"


def operations(result: dict[str, Any] | None) -> Iterator[str]:
    """Each operation beside its peers."""
    if result is None:
        return
    yield "## Operations\n"
    groups = sorted({row["group"] for row in result["rows"]})
    machines = {_machine(row["machine"]) for row in result["rows"]}
    for group in groups:
        yield f"### {group[0].upper()}{group[1:]}\n"
        yield "| | median | spread (IQR) | rounds | |"
        yield "|---|---:|---:|---:|---|"
        rows = [row for row in result["rows"] if row["group"] == group]
        for row in sorted(rows, key=lambda row: row["median_seconds"]):
            ratio = row.get("ratio_to_fastest_peer")
            text = "peer" if ratio is None else f"{ratio:.2f}x the fastest peer"
            yield (
                f"| {row['name'].removeprefix('peer_')} | {1e3 * row['median_seconds']:.3f} ms | "
                f"{1e3 * row['iqr_seconds']:.3f} ms | {row['rounds']} | {text} |"
            )
        yield ""
    yield from (f"{machine}\n" for machine in sorted(machines))


if __name__ == "__main__":
    main()
