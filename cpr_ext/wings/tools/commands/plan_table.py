"""A plan as text and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cpr_ext.wings.cli.output import size, table_lines
from cpr_ext.wings.policy import Plan, Strategy

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
