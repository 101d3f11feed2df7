"""Expected cost of training with parity, for failures at a constant rate (derived).

A failure that parity makes good loses nothing: all workers return to one step, at most two steps
back, which are not counted. Where it does not suffice, lost shards load their newest save from the
store and training continues, as in partial recovery. The clocks are those of
:mod:`cpr_ext.wings.policy.expectation`; but a second loss strikes at any time while the first is
replaced and rebuilt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cpr_ext.wings.policy.costs import ALL_ROWS, JobCosts, JobSize, SavePattern
from cpr_ext.wings.policy.expectation import Expectation, FailureClock, expected_partial_recovery
from cpr_ext.wings.policy.parity_costs import ParityCosts
from cpr_ext.wings.policy.second_loss import mean_hours_between_fallbacks, second_loss


@dataclass(frozen=True)
class ParityExpectation(Expectation):
    """Mean over failure histories.

    Attributes:
        fallbacks: number of failures that parity did not make good.
        fallback_chance: that there is one or more.
    """

    fallbacks: float
    fallback_chance: float


def unprotected_hours(costs: JobCosts, parity: ParityCosts) -> float:
    """Return the time from a loss until the group is whole: replace, decode, encode."""
    return costs.reschedule_hours + parity.rebuild_hours


def expected_parity(
    costs: JobCosts,
    job: JobSize,
    parity: ParityCosts,
    mtbf_hours: float,
    interval_hours: float,
    *,
    pattern: SavePattern = ALL_ROWS,
    clock: FailureClock = "training",
) -> ParityExpectation:
    """Return the overhead with parity, and saves every ``interval_hours`` for fallbacks.

    Raises:
        UsageError: a time is not above 0, or the groups do not fit.
    """
    parity.require_fit(job.num_shards)
    partial = expected_partial_recovery(
        costs, job, mtbf_hours, interval_hours, pattern=pattern, clock=clock
    )
    window = unprotected_hours(costs, parity)
    given = (job, mtbf_hours, parity.group_size, window)
    loss, between = second_loss(*given), mean_hours_between_fallbacks(*given)
    fallbacks = partial.failures * mtbf_hours / between
    lost_shards = loss.shards_lost / job.shards_per_failure
    share = fallbacks / partial.failures
    overhead = replace(
        partial.overhead,
        load_hours=partial.failures * parity.rebuild_stall * parity.rebuild_hours
        + fallbacks * costs.load_shard_hours,
        parity_hours=parity.steady_share * job.total_hours,
    )
    return ParityExpectation(
        overhead=overhead,
        failures=partial.failures,
        pls=partial.pls * share * lost_shards,
        fallbacks=fallbacks,
        fallback_chance=-math.expm1(-fallbacks),
    )
