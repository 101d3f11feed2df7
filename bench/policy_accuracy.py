"""How far the policy's formulas are from simulated failure histories; kept as JSON.

    python bench/policy_accuracy.py

Three parts: the paper's formulas where their assumptions hold, against 2,000 histories; the
expectations that the planner uses, where they do not hold; and the abstract's figures.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from cpr_ext.wings.lab.emulation.machine import describe_machine
from cpr_ext.wings.policy import (
    ExponentialFailures,
    JobCosts,
    JobSize,
    SavePattern,
    expected_pls,
    full_recovery,
    interval_for_pls,
    partial_recovery,
    young_interval_hours,
)
from cpr_ext.wings.policy.expectation import expected_full_recovery, expected_partial_recovery
from cpr_ext.wings.policy.planner import Planner
from cpr_ext.wings.policy.presets import PRESETS
from cpr_ext.wings.policy.simulation import simulate_full_recovery, simulate_partial_recovery

RESULTS = Path(__file__).resolve().parent / "results" / "policy_accuracy.json"
COSTS = JobCosts(save_hours=0.09, load_hours=0.05, load_shard_hours=0.05, reschedule_hours=0.07)


def main() -> None:
    formulas = list(formula_grid())
    expectations = list(expectation_grid())
    results = {
        "machine": describe_machine(),
        "formulas_where_they_hold": {
            "assumptions": "interval <= MTBF/10, job >= 20 MTBF and >= 200 intervals, failures "
            "at a constant rate while training",
            "histories": 2000,
            "worst_percent": worst(formulas),
            "rows": formulas,
        },
        "expectations_where_formulas_do_not_hold": {
            "histories": 200_000,
            "worst_percent": worst(expectations),
            "rows": expectations,
        },
        "abstract": [abstract_figures(5.0, 8.3), abstract_figures(5.6, 5.4)],
        "presets": {name: preset_figures(name) for name in PRESETS},
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for name in ("formulas_where_they_hold", "expectations_where_formulas_do_not_hold"):
        print(f"{name}: {results[name]['worst_percent']}")
    print(json.dumps(results["abstract"], indent=1))


def formula_grid() -> Any:
    """The paper's formulas beside 2,000 histories."""
    grid = itertools.product((8, 28, 100), (0.02, 0.05, 0.1), (20, 100), (1, 4))
    for number, (mtbf, share, failures, lost) in enumerate(grid):
        interval = share * mtbf
        job, model = JobSize(failures * mtbf, 18, lost), ExponentialFailures(mtbf)
        full = simulate_full_recovery(COSTS, job, model, interval, seed=number)
        partial = simulate_partial_recovery(COSTS, job, model, interval, seed=number)
        yield {
            "mtbf_hours": mtbf,
            "interval_hours": interval,
            "job_hours": job.total_hours,
            "shards_per_failure": lost,
            "full": compare(
                full_recovery(COSTS, job, mtbf, interval).total_hours,
                full.overhead.total_hours,
                full.total_standard_error_hours,
            ),
            "partial": compare(
                partial_recovery(COSTS, job, mtbf, interval).total_hours,
                partial.overhead.total_hours,
                partial.total_standard_error_hours,
            ),
            "pls": compare(
                expected_pls(job, mtbf, interval), partial.pls, partial.pls_standard_error
            ),
        }


def expectation_grid() -> Any:
    """The planner's expectations: short jobs, long intervals, failures while work is redone."""
    cases = [(56, 28, 2.24), (56, 28, 44.8), (50, 10, 1.3), (50, 10, 9), (100, 28, 150), (20, 9, 7)]
    grid = itertools.product(cases, ("training", "running"), (1.0, 0.125))
    for number, ((total, mtbf, interval), clock, fraction) in enumerate(grid):
        job, model = JobSize(total, 18, 4), ExponentialFailures(mtbf)
        pattern = SavePattern(fraction, min(1.0, 1.07 * fraction))
        options: dict[str, Any] = {"clock": clock}
        played: dict[str, Any] = {**options, "histories": 200_000, "seed": number}
        expected = expected_partial_recovery(COSTS, job, mtbf, interval, pattern=pattern, **options)
        partial = simulate_partial_recovery(COSTS, job, model, interval, pattern=pattern, **played)
        row = {
            "mtbf_hours": mtbf,
            "interval_hours": interval,
            "job_hours": total,
            "clock": clock,
            "fraction": fraction,
            "partial": compare(
                expected.overhead.total_hours,
                partial.overhead.total_hours,
                partial.total_standard_error_hours,
            ),
            "pls": compare(expected.pls, partial.pls, partial.pls_standard_error),
        }
        if fraction == 1:
            full = simulate_full_recovery(COSTS, job, model, interval, **played)
            row["full"] = compare(
                expected_full_recovery(COSTS, job, mtbf, interval, **options).overhead.total_hours,
                full.overhead.total_hours,
                full.total_standard_error_hours,
            )
            row["papers_formula_full_error_percent"] = percent_off(
                full_recovery(COSTS, job, mtbf, interval).total_hours, full.overhead.total_hours
            )
        yield row


def compare(closed: float, simulated: float, standard_error: float) -> dict[str, float]:
    return {
        "closed": closed,
        "simulated": simulated,
        "standard_error_percent": round(100 * standard_error / simulated, 3),
        "error_percent": percent_off(closed, simulated),
    }


def percent_off(closed: float, simulated: float) -> float:
    return round(100 * (closed / simulated - 1), 3)


def worst(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {
        what: max((row[what]["error_percent"] for row in rows if what in row), key=abs)
        for what in ("full", "partial", "pls")
    }


def abstract_figures(save_minutes: float, recover_minutes: float) -> dict[str, float]:
    """The abstract's percentages from given costs (derived, not published)."""
    job, mtbf = JobSize(56, 8), 28.0
    costs = JobCosts(save_minutes / 60, recover_minutes / 60, recover_minutes / 60, 0)
    often = young_interval_hours(costs.save_hours, mtbf)
    rare = interval_for_pls(job, mtbf, 0.1)
    return {
        "save_minutes": save_minutes,
        "load_and_reschedule_minutes": recover_minutes,
        "full_interval_hours": often,
        "full_percent": 100 * full_recovery(costs, job, mtbf, often).fraction_of(job),
        "partial_at_full_interval_percent": 100
        * partial_recovery(costs, job, mtbf, often).fraction_of(job),
        "cpr_interval_hours": rare,
        "cpr_percent": 100 * partial_recovery(costs, job, mtbf, rare).fraction_of(job),
    }


def preset_figures(name: str) -> list[dict[str, Any]]:
    preset = PRESETS[name]
    plan = Planner(preset.job, preset.costs, preset.failures).plan(preset.target_pls)
    return [
        {
            "strategy": strategy.name,
            "interval_hours": strategy.interval_hours,
            "overhead_percent": 100 * strategy.overhead_fraction,
            "papers_formula_percent": 100 * strategy.formula_overhead_fraction,
            "expected_pls": strategy.expected.pls,
        }
        for strategy in plan.strategies
    ]


if __name__ == "__main__":
    main()
