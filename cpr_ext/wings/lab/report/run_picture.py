"""Training runs as a picture: loss over samples, with failures and snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_COLORS = ("#1b6ca8", "#2a9d5c", "#d1495b", "#8a5fbf", "#b8860b")


def draw_runs(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw ``runs``, results of ``cpr train --json`` by label, to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
    for color, (label, run) in zip(_COLORS * len(runs), runs.items(), strict=False):
        samples, losses = _smooth(run["losses"])
        top.plot(samples, losses, color=color, lw=1.6, label=f"{label}: AUC {run['auc']:.4f}")
    _mark_failures(top, runs)
    top.set_ylabel("training loss (log loss)")
    top.legend(frameon=False)
    top.grid(alpha=0.25)
    _draw_snapshots(bottom, runs)
    bottom.set_xlabel("samples trained")
    bottom.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def _smooth(losses: list[list[float]], window: int = 5) -> tuple[Any, Any]:
    """Return the mean of the last ``window`` points, so that nothing shows before it happened."""
    if not losses:
        return np.empty(0), np.empty(0)
    samples, values = np.asarray(losses).T
    sums = np.cumsum(np.concatenate(([0.0], values)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return samples, (sums[ends] - sums[starts]) / (ends - starts)


def _mark_failures(axes: Any, runs: Mapping[str, Mapping[str, Any]]) -> None:
    marked = set()
    for run in runs.values():
        for failure in run["failures"]:
            where = failure["num_samples"]
            if where in marked:
                continue
            marked.add(where)
            axes.axvline(where, color="#444444", ls="--", lw=1)
            shards = ", ".join(map(str, failure["shards"]))
            axes.annotate(
                f"lost shards {shards}",
                (where, 1),
                xycoords=("data", "axes fraction"),
                xytext=(-4, -4),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="top",
                fontsize=8,
                color="#444444",
            )


def _draw_snapshots(axes: Any, runs: Mapping[str, Mapping[str, Any]]) -> None:
    labels = list(runs)
    for row, label in enumerate(labels):
        for kind, marker, size in (("base", "s", 34), ("partial", "|", 60)):
            where = [samples for samples, taken in runs[label]["snapshot_log"] if taken == kind]
            color = _COLORS[row % len(_COLORS)]
            axes.scatter(where, [row] * len(where), marker=marker, s=size, color=color)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_title("snapshots (■ base, | partial)", fontsize=9, loc="left")
    axes.grid(axis="x", alpha=0.25)
