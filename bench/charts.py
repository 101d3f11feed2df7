"""The charts of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from results import Results
from targets import Target, targets

OURS, OTHER, MISSED = "#1f77b4", "#b3b3b3", "#d1495b"
COLORS = {1: "#7fb3d9", 2: OURS}


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=120)
    plt.close(figure)


def tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)


def plain(axis: Any, ticks: Sequence[float]) -> None:
    """Ticks of a logarithmic axis as plain numbers."""
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def ratios(results: Results, path: Path) -> None:
    """Every target that is a ratio to a peer or bound: a bar, 1.0, and where it should end."""
    bars: list[tuple[str, Target, float]] = []
    for target in targets():
        if target.sign == ">=":
            for label, value in target.read(results).items():
                bars.append((_name(target, label), target, value))
    figure, axes = plt.subplots(figsize=(10, 0.9 + 0.24 * len(bars)), layout="constrained")
    values = [value for _, _, value in bars]
    colors = [OURS if target.holds(value) else MISSED for _, target, value in bars]
    axes.barh([name for name, _, _ in bars], values, color=colors, height=0.68)
    for place, (_, target, value) in enumerate(bars):
        axes.plot([target.bound] * 2, [place - 0.45, place + 0.45], color="black", lw=2)
        axes.annotate(
            f"{value:.2f}" if value < 10 else f"{value:.0f}",
            (max(value, target.bound), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.axvline(1.0, color="black", lw=0.8, ls=":")
    axes.set_xscale("log")
    low, high = min([0.5, *values]), max([2.0, *values])
    axes.set_xlim(0.8 * low, 1.5 * high)
    plain(axes.xaxis, [t for t in (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= t <= 1.5 * high])
    axes.set_xlabel(
        "times as fast as the peer or bound named (log scale); black mark: target; red: missed"
    )
    axes.tick_params(axis="y", labelsize=8)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    tidy(axes)
    save(figure, path)


def _name(target: Target, label: str) -> str:
    what = target.measure.rpartition("over ")[2].replace("`", "")
    what = what.replace("torch.distributed.checkpoint.", "dcp.")
    return ", ".join(part for part in (target.stage, label, f"over {what}") if part)
