"""An emulation as one picture: what each strategy costs, and the accuracy lost over PLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cpr_ext.wings.lab.emulation.campaign import Campaign, RunKey
from cpr_ext.wings.lab.emulation.summary import (
    OVERHEAD_PARTS,
    StrategySummary,
    fit_line,
    paired_losses,
    summarize,
)

# Okabe and Ito's colours, which colour-blind people can tell apart.
_COLORS = ("#7a7a7a", "#56b4e9", "#0072b2", "#cc79a7", "#009e73", "#e69f00", "#d55e00")
_PART_COLORS = ("#4477aa", "#ccbb44", "#ee6677", "#aaaaaa", "#aa3377")


def draw_emulation(campaign: Campaign, path: Path) -> None:
    """Draw a campaign with finished runs to a PNG, SVG or PDF file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    summaries = [one for one in summarize(campaign) if one.name != "no-failure"]
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    job_hours = float(next(iter(campaign.runs.values()))["job_hours"])
    _draw_overhead(left, summaries, job_hours)
    _draw_losses(right, campaign, summaries)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=130)


def _draw_overhead(axes: Any, summaries: list[StrategySummary], job_hours: float) -> None:
    places, begin = np.arange(len(summaries)), np.zeros(len(summaries))
    for part, color in zip(OVERHEAD_PARTS, _PART_COLORS, strict=True):
        shares = np.array([100 * one.overhead_parts[part] / job_hours for one in summaries])
        label = part.removesuffix("_hours").replace("_", " ")
        axes.barh(places, shares, left=begin, height=0.66, color=color, label=label)
        begin += shares
    axes.set_yticks(places, [one.label for one in summaries])
    axes.invert_yaxis()
    axes.set_xlabel("overhead, % of useful training time (mean over seeds)")
    axes.legend(frameon=False)


def _draw_losses(axes: Any, campaign: Campaign, summaries: list[StrategySummary]) -> None:
    axes.axhline(0, color="#999999", lw=0.8)
    for one, color in zip(summaries, _COLORS, strict=False):
        losses = paired_losses(campaign, one.name)
        if one.name == "full" or not losses:
            continue
        pls = [campaign.runs[RunKey(seed, one.name)]["pls"] for seed in losses]
        label = one.label
        if (line := fit_line(pls, list(losses.values()))) is not None:
            ends = np.array([0, max(pls)])
            axes.plot(ends, line.slope * ends + line.intercept, color=color, lw=1.8)
            label += f": {line.slope:.3f} per PLS, r = {line.correlation:.2f}"
        axes.scatter(pls, list(losses.values()), s=24, color=color, alpha=0.75, label=label)
    axes.set_xlabel("PLS of the run (whole saves every T_save)")
    axes.set_ylabel("AUC loss against no failure, same seed")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
