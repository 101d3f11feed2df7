"""The pictures of an emulation. Each takes a width in inches, so that a phone gets its own."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.emulation.campaign import Campaign, RunKey
from cpr_ext.wings.lab.emulation.statistics import fit_line
from cpr_ext.wings.lab.emulation.strategies import STRATEGIES, EmulatedStrategyName
from cpr_ext.wings.lab.emulation.summary import (
    OVERHEAD_PARTS,
    StrategySummary,
    paired_losses,
    summarize,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people can tell apart.
COLORS: dict[EmulatedStrategyName, str] = {
    "no-failure": "#333333",
    "full": "#7a7a7a",
    "partial": "#56b4e9",
    "cpr-vanilla": "#0072b2",
    "cpr-scar": "#cc79a7",
    "cpr-mfu": "#009e73",
    "cpr-ssu": "#e69f00",
    "parity": "#d55e00",
}
_MARKERS: dict[EmulatedStrategyName, str] = {
    "partial": "s",
    "cpr-vanilla": "o",
    "cpr-scar": "D",
    "cpr-mfu": "^",
    "cpr-ssu": "v",
    "parity": "P",
}
_LABELS = ("save", "load", "lost computation", "reschedule", "tracking", "parity")
_PART_LABELS = dict(zip(OVERHEAD_PARTS, _LABELS, strict=True))
_HUES = ("#4477aa", "#ccbb44", "#ee6677", "#aaaaaa", "#228833", "#aa3377")
_PART_COLORS = dict(zip(OVERHEAD_PARTS, _HUES, strict=True))
_NOT_ALWAYS = ("tracking_hours", "parity_hours")  # with measured costs; with parity
_NARROW_INCHES = 5.0

Plot = Callable[[Campaign, float], "Figure | None"]


def plots() -> dict[str, Plot]:
    """Return the plots by file stem, in the order of the page; None: nothing to show."""
    return {
        "overhead": draw_overhead,
        "loss_by_pls": draw_loss_by_pls,
        "timeline": draw_timeline,
        "access_skew": draw_access_skew,
    }


def to_svg(figure: Figure) -> str:
    """Return a figure as SVG text, with its letters as text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cpr"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    figure.savefig(path, dpi=150)


def draw_overhead(campaign: Campaign, width_inches: float) -> Figure | None:
    """Overhead as a share of the job, by part: one bar per strategy."""
    shown = [summary for summary in summarize(campaign) if summary.name != "no-failure"]
    if not shown:
        return None
    job_hours = _job_hours(campaign)
    is_narrow = width_inches < _NARROW_INCHES
    figure = _figure(width_inches, 1.5 + 0.42 * len(shown) + 0.3 * is_narrow)
    axes = figure.subplots()
    left = np.zeros(len(shown))
    places = np.arange(len(shown))
    for part in OVERHEAD_PARTS:
        shares = np.array([100 * one.overhead_parts[part] / job_hours for one in shown])
        if part in _NOT_ALWAYS and not shares.any():
            continue
        axes.barh(
            places, shares, left=left, height=0.66, color=_PART_COLORS[part],
            label=_PART_LABELS[part],
        )  # fmt: skip
        left += shares
    for place, one in zip(places, shown, strict=True):
        axes.annotate(
            _overhead_text(one),
            (left[place], place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    axes.set_yticks(places, [one.label for one in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, max(left.max(), 1e-9) * (1.45 if is_narrow else 1.25))
    per_cent = "overhead, % of useful training time"
    axes.set_xlabel(per_cent if is_narrow else f"{per_cent} (mean over seeds)")
    axes.legend(
        frameon=False, ncols=2 if is_narrow else 5, loc="lower left", bbox_to_anchor=(-0.02, 1.0)
    )
    _tidy(axes)
    return figure


def _overhead_text(summary: StrategySummary) -> str:
    text = f"{100 * summary.overhead_share.mean:.2f} %"
    low, high = summary.overhead_share.low, summary.overhead_share.high
    return text if math.isnan(low) else f"{text} ± {50 * (high - low):.2f}"


def draw_loss_by_pls(campaign: Campaign, width_inches: float) -> Figure | None:
    """Return AUC loss over PLS, one point per run, with a line per strategy."""
    points = {}
    for name in _MARKERS:
        losses = paired_losses(campaign, name)
        if losses:
            over = [campaign.runs[RunKey(seed, name)]["pls"] for seed in losses]
            points[name] = (np.array(over), np.array(list(losses.values())))
    if not points:
        return None
    is_narrow = width_inches < _NARROW_INCHES
    figure = _figure(width_inches, 5.2 if is_narrow else 4.2)
    axes = figure.subplots()
    axes.axhline(0, color="#999999", lw=0.8)
    for name, (pls, lost) in points.items():
        label = STRATEGIES[name]
        if (line := fit_line(pls.tolist(), lost.tolist())) is not None:
            ends = np.array([0, pls.max()])
            axes.plot(ends, line.slope * ends + line.intercept, color=COLORS[name], lw=1.8)
            label += f": {line.slope:.3f} per PLS, r = {line.correlation:.2f}"
        axes.scatter(
            pls, lost, marker=_MARKERS[name], s=24, color=COLORS[name], alpha=0.75, lw=0,
            label=label,
        )  # fmt: skip
    axes.set_xlabel("PLS of the run (whole saves every T_save)")
    axes.set_ylabel("AUC loss against no failure, same seed")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.02, 1.0), fontsize=8.5,
                ncols=1 if is_narrow else 2)  # fmt: skip
    _tidy(axes)
    return figure


def draw_timeline(campaign: Campaign, width_inches: float) -> Figure | None:
    """Saves, failures and what was computed again, of one seed."""
    seed = _typical_seed(campaign)
    if seed is None:
        return None
    runs = {
        name: campaign.runs[RunKey(seed, name)]
        for name in STRATEGIES
        if name != "no-failure" and RunKey(seed, name) in campaign.runs
    }
    figure = _figure(width_inches, 1.6 + 0.42 * len(runs))
    axes = figure.subplots()
    for row, (name, run) in enumerate(runs.items()):
        axes.axhline(row, color="#dddddd", lw=5, zorder=0, solid_capstyle="butt")
        axes.vlines(run["saves"], row - 0.26, row + 0.26, color=COLORS[name], lw=1.4)
        for failure in run["failures"]:
            lost = failure["lost_computation_hours"]
            if lost:
                begin = failure["hour"] - lost
                axes.barh(row, lost, left=begin, height=0.34, color="#ee6677", zorder=1)
            color = "#228833" if failure.get("is_by_parity") else "#bb0000"
            axes.plot(failure["hour"], row, marker="x", color=color, ms=7, mew=1.8, zorder=3)
    axes.set_yticks(range(len(runs)), [STRATEGIES[name] for name in runs])
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.set_xlim(0, _job_hours(campaign))
    axes.set_xlabel("useful training, hours")
    title = f"seed {seed}:  | save   x failure   red: computed again"
    if "parity" in runs:
        title += "   green: nothing lost"
    axes.set_title(title, fontsize=9, loc="left")
    _tidy(axes)
    axes.grid(visible=False)
    return figure


def _typical_seed(campaign: Campaign) -> int | None:
    """Return the first seed whose number of failures is the median of those with any."""
    failures: dict[int, int] = {}
    for key, run in sorted(campaign.runs.items()):
        failures[key.seed] = max(failures.get(key.seed, 0), len(run["failures"]))
    struck = {seed: count for seed, count in failures.items() if count}
    if not struck:
        return None
    median = sorted(struck.values())[len(struck) // 2]
    return next(seed for seed, count in struck.items() if count == median)


def draw_access_skew(campaign: Campaign, width_inches: float) -> Figure | None:
    """Return what share of all accesses the hottest rows take."""
    coverage = campaign.facts.get("coverage")
    if not coverage:
        return None
    figure = _figure(width_inches, 3.6)
    axes = figure.subplots()
    rows = 100 * np.array(coverage["row_share"])
    accesses = 100 * np.array(coverage["access_share"])
    axes.plot(rows, accesses, color=COLORS["cpr-mfu"], lw=2)
    axes.set_xscale("log")
    axes.set_ylim(0, 103)
    fraction, covered = 100 * coverage["fraction"], 100 * coverage["covered"]
    axes.axvline(fraction, color="#777777", ls="--", lw=1)
    axes.plot(fraction, covered, "o", color=COLORS["cpr-mfu"], ms=6)
    axes.text(
        0.03,
        0.93,
        f"top {fraction:g} % of each table:\n{covered:.0f} % of all accesses",
        transform=axes.transAxes,
        va="top",
        fontsize=9.5,
    )
    axes.set_xlabel("hottest rows, % of all rows of the large tables")
    axes.set_ylabel("accesses they take, %")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _tidy(axes)
    return figure


def _job_hours(campaign: Campaign) -> float:
    return float(next(iter(campaign.runs.values()))["job_hours"])


def _figure(width_inches: float, height_inches: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError("pictures need matplotlib: pip install 'cpr_ext[train]'") from error
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def draw_all(campaign: Campaign, width_inches: float) -> dict[str, Any]:
    """Return every plot that has something to show, by file stem."""
    drawn = {stem: draw(campaign, width_inches) for stem, draw in plots().items()}
    return {stem: figure for stem, figure in drawn.items() if figure is not None}


def names_of(campaigns: Sequence[Campaign]) -> list[str]:
    """Return a short name for each campaign, different for each."""
    names: list[str] = []
    for campaign in campaigns:
        stem = campaign.directory.resolve().name
        name, number = stem, 2
        while name in names:
            name, number = f"{stem}-{number}", number + 1
        names.append(name)
    return names
