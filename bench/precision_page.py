"""Write what docs/precision.md and docs/paper_map.md say from the kept results; draw the chart.

    python bench/precision_page.py

Of bench/precision_accuracy.py, bench/precision_restores.py and bench/row_precision.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from charts import plain, save
from precision_accuracy import PRECISIONS
from precision_tables import DATA, PARTS, kept, with_part
from results import Row

from cpr_ext.lab.emulation.statistics import estimate

DOCS = Path(__file__).resolve().parents[1] / "docs"
IMAGE = DOCS / "images/precision_accuracy.png"
COLORS = dict(zip(PRECISIONS, ("#333333", "#8c8c8c", "#1f77b4", "#d1495b"), strict=True))
#: The interval of float32 whose bytes per hour count as 1.
UNIT_SHARE = 0.1


def main() -> None:
    draw_all()
    for page, parts in PARTS.items():
        text = (DOCS / page).read_text()
        for name, part in parts.items():
            text = with_part(text, name, part())
        (DOCS / page).write_text(text)


def draw_all() -> None:
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axes, (name, label) in zip(panels, DATA.items(), strict=True):
        results = kept("accuracy", name)
        draw(axes, results["runs"])
        axes.set_title(f"{label}, {len(results['runs'])} seeds", fontsize=10)
    panels[0].set_ylabel("AUC lost by the failure, 10⁻³ (log scale)")
    figure.supxlabel(
        "bytes of rows written per hour; 1: float32, saved every 10 % of the training", fontsize=10
    )
    panels[1].legend(frameon=False, fontsize=9)
    save(figure, IMAGE)


def draw(axes: Any, runs: list[Row]) -> None:
    unit = mean_rate(runs, find(runs, "float32", UNIT_SHARE, "saves"))
    for precision in PRECISIONS:
        points = []
        for number, arm in enumerate(runs[0]["arms"]):
            if arm["precision"] == precision:
                loss = estimate([run["auc"] - run["arms"][number]["auc"] for run in runs])
                points.append((mean_rate(runs, number) / unit, loss))
        points.sort(key=lambda point: point[0])
        x = [bytes_ for bytes_, _ in points]
        means = [1e3 * loss.mean for _, loss in points]
        reach = [1e3 * (loss.high - loss.mean) for _, loss in points]
        low = [min(each, 0.999 * mean) for each, mean in zip(reach, means, strict=True)]
        axes.errorbar(x, means, yerr=[low, reach], marker="o", ms=4, capsize=2, lw=1.2,
                      color=COLORS[precision], label=precision)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(0.02, 20)
    plain(axes.xaxis, [0.125, 0.25, 0.5, 1, 2])
    plain(axes.yaxis, [0.03, 0.1, 0.3, 1, 3, 10])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def find(runs: list[Row], precision: str, share: float, same: str) -> int:
    wanted = {"precision": precision, "share": share, "same": same}
    return next(n for n, arm in enumerate(runs[0]["arms"]) if wanted.items() <= arm.items())


def mean_rate(runs: list[Row], number: int) -> float:
    arms = [run["arms"][number] for run in runs]
    return sum(a["bytes"] / a["snapshots"] / a["every_steps"] for a in arms) / len(arms)


if __name__ == "__main__":
    main()
