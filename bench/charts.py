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
from results import Results, Row
from targets import Target, number, targets

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


def training(rows: Sequence[Row], path: Path) -> None:
    """Speed and longest pause of each way to save."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
    colors = [OURS if row["what"].startswith("cpr_ext") else OTHER for row in rows]
    names = [row["mode"] for row in rows]
    speeds = [row["ratio_to_none"] for row in rows]
    left.barh(names, speeds, color=colors)
    left.axvline(1.0, color="black", lw=0.8, ls=":")
    left.set_xlim(0, max(1.2, 1.12 * max(speeds)))
    left.set_xlabel("samples/s, over training that saves nothing")
    for place, speed in enumerate(speeds):
        left.annotate(
            f"{speed:.3f}", (max(speed, 1.0), place), (4, 0),
            textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    pauses = [1e3 * row["longest_pause_seconds"] for row in rows]
    right.barh(names, pauses, color=colors)
    right.set_xscale("log")
    held = [pause for pause in pauses if pause > 0]
    right.set_xlim(min(held) / 4, 6 * max(held))
    for place, pause in enumerate(pauses):
        right.annotate(
            number(pause) if pause > 0 else "none", (pause or min(held) / 4, place), (4, 0),
            textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    right.set_xlabel("longest pause of a save, ms (log scale)")
    right.set_yticklabels([])
    plain(right.xaxis, [10.0**power for power in range(6) if min(held) / 4 <= 10**power])
    for axes in (left, right):
        axes.invert_yaxis()
        tidy(axes)
    save(figure, path)


def peers(rows: Sequence[Row], path: Path) -> None:
    """What one save of the whole model costs with each saver."""
    columns = (
        ("held_seconds", "training held, s", 1.0),
        ("durable_seconds", "until durable, s", 1.0),
        ("peak_memory_bytes", "memory over training's, GB", 1e-9),
    )
    figure, all_axes = plt.subplots(
        1, 3, figsize=(10, 1.0 + 0.27 * len(rows)), sharey=True, layout="constrained"
    )
    names = [row["name"].replace("torch.distributed.checkpoint.", "dcp.") for row in rows]
    colors = [OURS if name.startswith("cpr_ext") else OTHER for name in names]
    for axes, (key, label, factor) in zip(all_axes, columns, strict=True):
        values = [factor * row[key] for row in rows]
        axes.barh(names, values, color=colors)
        axes.set_xlim(0, 1.25 * max(values))
        for place, value in enumerate(values):
            axes.annotate(
                f"{value:.2f}" if value >= 0.1 else f"{value:.3f}",
                (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8,
            )  # fmt: skip
        axes.set_xlabel(label)
        tidy(axes)
    all_axes[0].invert_yaxis()
    save(figure, path)
