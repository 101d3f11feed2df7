"""What checkpoints and failures cost a job: the paper's formulas, and exact expectations.

The formulas are those of CPR (Maeng et al., MLSys 2021), re-derived; Young's interval is of J. W.
Young, CACM 17(9), 1974. They take ``T_total/T_save`` saves, whole or not: right where the job is
long against the interval. The expectations (derived) need no such assumption: saves are whole, one
after each interval, the last at the latest at the end. Failures strike at a constant rate while
useful training is done, not while the job saves, loads or repeats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cpr_ext.wings.policy.costs import (
    ALL_ROWS,
    JobCosts,
    JobSize,
    SavePattern,
    require_not_negative,
    require_positive,
)
from cpr_ext.wings.policy.pls import exact_expected_pls, mean_hours_since_save, whole_saves


@dataclass(frozen=True)
class Overhead:
    """Hours beyond useful training, by cause.

    Attributes:
        save_hours: all saves.
        load_hours: loading after failures.
        lost_computation_hours: training that is done again; 0 for partial recovery.
        reschedule_hours: replacing failed nodes.
        parity_hours: keeping parity in peers' memory at every step.
    """

    save_hours: float
    load_hours: float
    lost_computation_hours: float
    reschedule_hours: float
    parity_hours: float = 0.0

    def __post_init__(self) -> None:
        require_not_negative(vars(self))

    @property
    def total_hours(self) -> float:
        """The sum of the parts."""
        return float(sum(vars(self).values()))

    def fraction_of(self, job: JobSize) -> float:
        """Return the total as a share of the job's useful training time; it may pass 1."""
        return self.total_hours / job.total_hours


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


def full_recovery(
    costs: JobCosts, job: JobSize, mtbf_hours: float, interval_hours: float
) -> Overhead:
    """Return the formula's overhead if all shards return to the last save and train again:
    ``O_save*T/T_save + (O_load + T_save/2 + O_resched)*T/T_fail``.

    Args:
        mtbf_hours: mean time between failures of the job as a whole, ``T_fail``.
        interval_hours: useful training between two saves, ``T_save``.

    Raises:
        UsageError: a time is not above 0.
    """
    require_positive({"mtbf_hours": mtbf_hours, "interval_hours": interval_hours})
    failures = job.total_hours / mtbf_hours
    return Overhead(
        save_hours=costs.save_hours * job.total_hours / interval_hours,
        load_hours=costs.load_hours * failures,
        lost_computation_hours=interval_hours / 2 * failures,
        reschedule_hours=costs.reschedule_hours * failures,
    )


def partial_recovery(
    costs: JobCosts, job: JobSize, mtbf_hours: float, interval_hours: float
) -> Overhead:
    """Return the formula's overhead if only lost shards are loaded and training continues:
    ``O_save*T/T_save + (O_load_shard + O_resched)*T/T_fail``.

    A priority that saves a share ``r`` of the rows every ``r*T_save`` costs the same.

    Raises:
        UsageError: a time is not above 0.
    """
    full = full_recovery(costs, job, mtbf_hours, interval_hours)
    failures = job.total_hours / mtbf_hours
    return Overhead(full.save_hours, costs.load_shard_hours * failures, 0.0, full.reschedule_hours)


def young_interval_hours(save_hours: float, mtbf_hours: float) -> float:
    """Return the interval at which :func:`full_recovery` costs least: ``sqrt(2*O_save*T_fail)``.

    Raises:
        UsageError: a time is not above 0.
    """
    require_positive({"save_hours": save_hours, "mtbf_hours": mtbf_hours})
    return math.sqrt(2 * save_hours * mtbf_hours)


def expected_full_recovery(
    costs: JobCosts, job: JobSize, mtbf_hours: float, interval_hours: float
) -> Expectation:
    """Return what is expected if all shards return to the last save and train again.

    Raises:
        UsageError: a time is not above 0.
    """
    require_positive({"mtbf_hours": mtbf_hours})
    failures = job.total_hours / mtbf_hours
    overhead = Overhead(
        save_hours=whole_saves(job.total_hours, interval_hours) * costs.save_hours,
        load_hours=costs.load_hours * failures,
        lost_computation_hours=mean_hours_since_save(job.total_hours, interval_hours) * failures,
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
) -> Expectation:
    """Return what is expected if only lost shards are loaded and training continues.

    PLS counts from the last time that all rows had had their turn, once in ``interval_hours``. That
    holds also for a pattern that saves a share of them more often: one account for every priority.

    Raises:
        UsageError: a time is not above 0.
    """
    pls = exact_expected_pls(job, mtbf_hours, interval_hours)
    failures = job.total_hours / mtbf_hours
    saves = whole_saves(job.total_hours, pattern.save_every_hours(interval_hours))
    overhead = Overhead(
        save_hours=saves * pattern.cost_share * costs.save_hours,
        load_hours=costs.load_shard_hours * failures,
        lost_computation_hours=0.0,
        reschedule_hours=costs.reschedule_hours * failures,
    )
    return Expectation(overhead, failures, pls)


def best_full_interval_hours(costs: JobCosts, job: JobSize, mtbf_hours: float) -> float:
    """Return the interval at which :func:`expected_full_recovery` costs least; it divides the job.

    Young's, where the job is long; at most the job: its end is always saved.

    Raises:
        UsageError: a time is not above 0.
    """

    def cost(saves: int) -> float:
        interval = job.total_hours / saves
        return expected_full_recovery(costs, job, mtbf_hours, interval).overhead.total_hours

    # Convex in the number of saves, and least near Young's.
    about = job.total_hours / young_interval_hours(costs.save_hours, mtbf_hours)
    return job.total_hours / min({max(1, math.floor(about)), math.ceil(about)}, key=cost)
