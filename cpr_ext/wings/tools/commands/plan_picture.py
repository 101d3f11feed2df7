"""A plan as text, as plain data, and as a picture: overhead and PLS against the interval."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from cpr_ext.errors import UsageError
from cpr_ext.wings.cli.output import size, table_lines
from cpr_ext.wings.policy import Plan, Planner, Strategy

_HEAD = ("", "save every", "overhead", "save", "load", "lost", "resched.")
_TAIL = ("formula", "PLS")


def format_plan(plan: Plan) -> str:
    """Return a line per strategy; overhead and its parts in percent of useful training time.

    ``*`` marks the recommended strategy, ``formula`` is the paper's overhead.
    """
    with_bytes = plan.strategies[0].bytes_per_hour is not None
    with_parity = any(strategy.fallback_chance is not None for strategy in plan.strategies)
    head = [*_HEAD, *(["parity"] if with_parity else []), *_TAIL]
    if with_bytes:
        head.append("written per h")
    rows = [_cells(plan, strategy, with_parity) for strategy in plan.strategies]
    return "\n".join(table_lines(head, rows))


def _cells(plan: Plan, strategy: Strategy, with_parity: bool) -> list[str]:
    parts = strategy.expected.overhead
    hours = (
        parts.save_hours,
        parts.load_hours,
        parts.lost_computation_hours,
        parts.reschedule_hours,
        *([parts.parity_hours] if with_parity else []),
    )
    mark = "* " if strategy is plan.recommended else "  "
    cells = [
        mark + strategy.name,
        format_hours(strategy.save_every_hours),
        f"{_percent(strategy.overhead_fraction)} %",
        *(_percent(part / plan.job.total_hours) for part in hours),
        f"{_percent(strategy.formula_overhead_fraction)} %",
        f"{strategy.expected.pls:.4f}",
    ]
    if strategy.bytes_per_hour is not None:
        cells.append(size(strategy.bytes_per_hour))
    return cells


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.2f}" if percent >= 0.1 or not percent else f"{percent:.2g}"


def format_hours(hours: float) -> str:
    """Return ``44.8 h``, ``17.5 min`` or ``3.1 s``."""
    if hours >= 1:
        return f"{hours:.3g} h" if hours < 1000 else f"{hours:.0f} h"
    return f"{60 * hours:.3g} min" if hours >= 1 / 60 else f"{3600 * hours:.2g} s"


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return the plan for JSON; hours and shares as in :class:`~cpr_ext.wings.policy.Plan`."""
    return {
        "job": asdict(plan.job),
        "costs": asdict(plan.costs),
        "target_pls": plan.target_pls,
        "mtbf_hours": plan.mtbf_hours,
        "strategies": [asdict(strategy) for strategy in plan.strategies],
        "recommended": plan.recommended.name,
        "reason": plan.reason,
        "notes": list(plan.notes),
    }


_FULL, _PARTIAL, _PARITY, _GREY = "#d1495b", "#1b6ca8", "#2a9d5c", "#444444"


def draw_plan(planner: Planner, plan: Plan, path: Path) -> None:
    """Draw ``plan``, made by ``planner``, to a PNG, SVG or PDF file.

    Raises:
        UsageError: matplotlib is missing, or the file's ending is none it can write.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError("pictures need matplotlib: pip install 'cpr_ext[train]'") from error
    figure = Figure(figsize=(9, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    full, vanilla = plan.strategies[0], plan.strategies[2]
    shortest = min(full.interval_hours, vanilla.interval_hours) / 4
    hours = _intervals(min(shortest, plan.job.total_hours / 4), plan)
    partial = [planner.partial_recovery("CPR-vanilla", "all", float(h)) for h in hours]
    _draw_overhead(top, planner, plan, hours, partial)
    _draw_pls(bottom, plan, hours, partial)
    bottom.set_xlabel("interval in which all rows are saved")
    bottom.set_xscale("log")
    bottom.set_xlim(hours[0], hours[-1] * 1.02)
    ticks = [t for t in _TICKS_HOURS if hours[0] <= t <= hours[-1] * 1.02]
    bottom.set_xticks(ticks, [_tick(t) for t in ticks])
    bottom.minorticks_off()
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:
        raise UsageError(f"'{path}' cannot be drawn: {error}") from error


def _intervals(shortest_hours: float, plan: Plan) -> Any:
    """Return where to evaluate: densely at each whole save, else intervals that divide the job."""
    total = plan.job.total_hours
    shown = min(12.0, total / shortest_hours)
    close = np.geomspace(total / shown, total, 300)
    saves = np.unique(np.geomspace(shown, total / shortest_hours, 100).round())
    return np.unique(np.concatenate((total / saves, close)))


_TICKS_HOURS = (
    *(1 / 3600, 5 / 3600, 15 / 3600, 1 / 60, 2 / 60, 5 / 60, 10 / 60, 0.25, 0.5, 1, 2, 5, 10, 20),
    *(50, 100, 200, 500, 1000, 2000, 5000),
)


def _tick(hours: float) -> str:
    if hours >= 1:
        return f"{hours:g} h"
    return f"{60 * hours:g} min" if hours >= 1 / 60 else f"{3600 * hours:g} s"


def _draw_overhead(axes: Any, planner: Planner, plan: Plan, hours: Any, partial: list[Any]) -> None:
    full, vanilla = plan.strategies[0], plan.strategies[2]
    full_curve = [100 * planner.full_recovery(float(h)).overhead_fraction for h in hours]
    partial_curve = [100 * strategy.overhead_fraction for strategy in partial]
    axes.plot(hours, full_curve, color=_FULL, lw=2, label="full recovery")
    axes.plot(hours, partial_curve, color=_PARTIAL, lw=2, label="partial recovery")
    ceiling = 3 * max(100 * full.overhead_fraction, 100 * vanilla.overhead_fraction)
    axes.set_ylim(0, ceiling)
    marked = [
        (full, _FULL, "best full recovery"),
        (vanilla, _PARTIAL, f"partial at PLS {vanilla.expected.pls:.2g}"),
    ]
    marked += [(one, _PARITY, "parity") for one in plan.strategies if one.name == "parity"]
    for strategy, color, name in marked:
        share = 100 * strategy.overhead_fraction
        axes.plot(strategy.interval_hours, share, "o", color=color, ms=7, zorder=5)
        at_right = strategy.interval_hours > 0.4 * plan.job.total_hours
        axes.annotate(
            f"{name}: {share:.2f} %\nevery {format_hours(strategy.interval_hours)}",
            (strategy.interval_hours, share),
            xytext=(0, 14),
            textcoords="offset points",
            ha="right" if at_right else "center",
            va="bottom",
            color=color,
            fontsize=9,
            bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.8},
        )
    axes.set_ylabel("overhead, % of training time")
    axes.legend(frameon=False, loc="upper right")
    job = plan.job
    count = f"{job.shards_per_failure} shard{'s' if job.shards_per_failure > 1 else ''}"
    axes.set_title(
        f"{job.total_hours:g} h on {job.num_shards} shards, a failure every "
        f"{plan.mtbf_hours:.3g} h takes {count}",
        fontsize=11,
        loc="left",
    )


def _draw_pls(axes: Any, plan: Plan, hours: Any, partial: list[Any]) -> None:
    axes.plot(hours, [s.expected.pls for s in partial], color=_PARTIAL, lw=2)
    axes.axhline(plan.target_pls, color=_GREY, ls="--", lw=1)
    axes.text(
        hours[0], plan.target_pls, f" target PLS {plan.target_pls:g}", va="bottom", color=_GREY,
        fontsize=9,
    )  # fmt: skip
    vanilla = plan.strategies[2]
    axes.plot(vanilla.interval_hours, vanilla.expected.pls, "o", color=_PARTIAL, ms=7, zorder=5)
    axes.set_ylim(0, 1.3 * max(plan.target_pls, *(s.expected.pls for s in partial)))
    axes.set_ylabel("PLS, partial recovery")
