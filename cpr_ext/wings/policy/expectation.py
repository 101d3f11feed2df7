"""Expected cost without the paper's two approximations, for failures at a constant rate (derived).

Saves are whole: one after each interval, the last at the latest at the end. Failures strike on one
of two clocks. ``"training"`` is the paper's account: only while useful training is done.
``"running"``: also during saves, and while lost work is repeated, which then may be lost again. On
neither during loading and rescheduling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy.checks import require_positive
from cpr_ext.wings.policy.costs import ALL_ROWS, JobCosts, JobSize, SavePattern
from cpr_ext.wings.policy.overhead import Overhead, young_interval_hours
from cpr_ext.wings.policy.pls import mean_hours_since_save, whole_saves

FailureClock = Literal["training", "running"]


@dataclass(frozen=True)
class Expectation:
    """Mean over failure histories.

    Attributes:
        overhead: hours by cause.
        failures: number of failures.
        pls: portion of lost samples; 0 for full recovery.
    """

    overhead: Overhead
    failures: float
    pls: float


def require_clock(clock: str) -> None:
    """Raise UsageError unless ``clock`` is one of the two."""
    if clock not in ("training", "running"):
        raise UsageError(f"clock is {clock!r}; allowed: 'training', 'running'")


def expected_full_recovery(
    costs: JobCosts,
    job: JobSize,
    mtbf_hours: float,
    interval_hours: float,
    *,
    clock: FailureClock = "training",
) -> Expectation:
    """Return the overhead if all shards return to the last save and train again.

    On the running clock, ``x`` hours without a save between take ``M*(exp(x/M) - 1)`` hours to get
    through at an MTBF of ``M``.

    Raises:
        UsageError: a time is not above 0, or the job would, as good as, never end.
    """
    require_positive({"mtbf_hours": mtbf_hours, "interval_hours": interval_hours})
    require_clock(clock)
    total = job.total_hours
    saves = whole_saves(total, interval_hours)
    if clock == "training":
        failures = total / mtbf_hours
        lost = mean_hours_since_save(total, interval_hours) * failures
    else:
        rest = max(0.0, total - saves * interval_hours)
        failures = _growth(rest / mtbf_hours)
        if saves:
            failures += saves * _growth((interval_hours + costs.save_hours) / mtbf_hours)
        if not failures < 1e9:
            raise UsageError(
                f"saving every {interval_hours:g} h at an MTBF of {mtbf_hours:g} h, this job would "
                "not end: lost work is lost again before it is saved; save more often"
            )
        lost = max(0.0, failures * mtbf_hours - total - saves * costs.save_hours)
    overhead = Overhead(
        save_hours=saves * costs.save_hours,
        load_hours=costs.load_hours * failures,
        lost_computation_hours=lost,
        reschedule_hours=costs.reschedule_hours * failures,
    )
    return Expectation(overhead, failures, 0.0)


def expected_partial_recovery(
    costs: JobCosts,
    job: JobSize,
    mtbf_hours: float,
    interval_hours: float,
    *,
    pattern: SavePattern = ALL_ROWS,
    clock: FailureClock = "training",
) -> Expectation:
    """Return the overhead if only lost shards are loaded and training continues.

    PLS counts from the last time that all rows had had their turn, once in ``interval_hours``. That
    holds also for a pattern that saves a share of them more often: one account for every priority.

    Raises:
        UsageError: a time is not above 0.
    """
    require_positive({"mtbf_hours": mtbf_hours, "interval_hours": interval_hours})
    require_clock(clock)
    total = job.total_hours
    step_hours = pattern.save_every_hours(interval_hours)
    save_hours = pattern.cost_share * costs.save_hours
    saves = whole_saves(total, step_hours)
    running = total + (saves * save_hours if clock == "running" else 0.0)
    failures = running / mtbf_hours
    # Hours since the last turn, integrated over the clock: first while training, then while saving.
    since_turn = mean_hours_since_save(total, interval_hours) * total
    if clock == "running":
        turns, left = divmod(saves, pattern.saves_per_turn)
        while_saving = turns * _sum_up_to(pattern.saves_per_turn) + _sum_up_to(left)
        since_turn += save_hours * step_hours * while_saving
    lost_per_failure = since_turn / total * job.shards_per_failure / job.num_shards
    overhead = Overhead(
        save_hours=saves * save_hours,
        load_hours=costs.load_shard_hours * failures,
        lost_computation_hours=0.0,
        reschedule_hours=costs.reschedule_hours * failures,
    )
    return Expectation(overhead, failures, lost_per_failure / mtbf_hours)


def best_full_interval_hours(
    costs: JobCosts, job: JobSize, mtbf_hours: float, *, clock: FailureClock = "training"
) -> float:
    """Return the interval at which :func:`expected_full_recovery` costs least; it divides the job.

    Young's, where the job is long and the MTBF longer; at most the job: its end is always saved.

    Raises:
        UsageError: a time is not above 0.
    """
    young = young_interval_hours(costs.save_hours, mtbf_hours)

    def cost(saves: int) -> float:
        interval = job.total_hours / saves
        try:
            expected = expected_full_recovery(costs, job, mtbf_hours, interval, clock=clock)
        except UsageError:
            return math.inf
        return expected.overhead.total_hours

    # Convex in the number of saves: walk down from Young's number, in steps that halve.
    saves = max(1, round(job.total_hours / young))
    step = max(1, saves // 2)
    while step:
        best = min((saves, saves + step, max(1, saves - step)), key=cost)
        if best == saves:
            step //= 2
        saves = best
    return job.total_hours / saves


def _sum_up_to(number: int) -> float:
    return number * (number + 1) / 2


def _growth(x: float) -> float:
    return math.expm1(x) if x < 700 else math.inf
