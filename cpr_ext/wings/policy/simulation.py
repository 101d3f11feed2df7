"""The reference: failure histories drawn and played by the rules of full and partial recovery.

Every failure is an event; histories are played side by side, one array element each. Holds for any
:class:`FailureModel`, which the formulas do not; clocks and rules are those of
:mod:`cpr_ext.wings.policy.expectation`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy.checks import require_positive
from cpr_ext.wings.policy.costs import ALL_ROWS, JobCosts, JobSize, SavePattern
from cpr_ext.wings.policy.expectation import (
    Expectation,
    FailureClock,
    expected_full_recovery,
    require_clock,
)
from cpr_ext.wings.policy.failure_models import FailureModel, FloatArray
from cpr_ext.wings.policy.overhead import Overhead
from cpr_ext.wings.policy.pls import whole_saves

DEFAULT_HISTORIES = 2000
_MOST_FAILURES = 20_000_000  # of all histories together; minutes of playing


@dataclass(frozen=True)
class Simulated(Expectation):
    """Means over the histories, with their standard errors.

    Attributes:
        total_standard_error_hours: of the mean of ``overhead.total_hours``.
        pls_standard_error: of the mean of ``pls``.
        histories: how many were played.
    """

    total_standard_error_hours: float
    pls_standard_error: float
    histories: int


def simulate_full_recovery(
    costs: JobCosts,
    job: JobSize,
    failures: FailureModel,
    interval_hours: float,
    *,
    clock: FailureClock = "training",
    histories: int = DEFAULT_HISTORIES,
    seed: int = 0,
) -> Simulated:
    """Play full recovery: go back to the last save, train again.

    Raises:
        UsageError: a time is not above 0, fewer than 2 histories, or the job hardly ever ends.
    """
    require_clock(clock)
    saves = whole_saves(job.total_hours, interval_hours)
    expected = expected_full_recovery(
        costs, job, failures.mean_hours, interval_hours, clock=clock
    ).failures
    require_playable(histories, expected)
    rng = np.random.default_rng(seed)
    count, lost = np.zeros(histories), np.zeros(histories)
    if clock == "training":
        alive, at = np.arange(histories), np.zeros(histories)
        while True:
            at = at + failures.draw(rng, at.size)
            alive, at = alive[at < job.total_hours], at[at < job.total_hours]
            if not alive.size:
                break
            count[alive] += 1
            lost[alive] += at - np.floor(at / interval_hours) * interval_hours
    else:
        cycle = interval_hours + costs.save_hours
        running = job.total_hours + saves * costs.save_hours
        alive, saved = np.arange(histories), np.zeros(histories)  # saves that hold
        while True:
            lasted = failures.draw(rng, alive.size)
            fails = lasted < running - saved * cycle
            alive, saved, lasted = alive[fails], saved[fails], lasted[fails]
            if not alive.size:
                break
            done = np.floor(lasted / cycle)  # whole ones: less than an interval follows the last
            saved = saved + done
            count[alive] += 1
            lost[alive] += lasted - done * cycle
    return _summarize(
        save_hours=saves * costs.save_hours,
        load_hours=costs.load_hours,
        reschedule_hours=costs.reschedule_hours,
        count=count,
        lost=lost,
        pls=np.zeros(histories),
    )


def simulate_partial_recovery(
    costs: JobCosts,
    job: JobSize,
    failures: FailureModel,
    interval_hours: float,
    *,
    pattern: SavePattern = ALL_ROWS,
    clock: FailureClock = "training",
    histories: int = DEFAULT_HISTORIES,
    seed: int = 0,
) -> Simulated:
    """Simulate partial recovery: load the lost shards, continue.

    Raises:
        UsageError: a time is not above 0, fewer than 2 histories, or too many failures to play.
    """
    require_positive({"interval_hours": interval_hours})
    require_clock(clock)
    step = pattern.save_every_hours(interval_hours)
    save_hours = pattern.cost_share * costs.save_hours
    saves = whole_saves(job.total_hours, step)
    cycle, running = step, job.total_hours
    if clock == "running":
        cycle, running = step + save_hours, job.total_hours + saves * save_hours
    require_playable(histories, running / failures.mean_hours)
    rng = np.random.default_rng(seed)
    count, since_turn = np.zeros(histories), np.zeros(histories)
    alive, at = np.arange(histories), np.zeros(histories)
    while True:
        at = at + failures.draw(rng, at.size)
        alive, at = alive[at < running], at[at < running]
        if not alive.size:
            break
        saved = np.minimum(np.floor(at / cycle), saves)
        trained = saved * step + np.minimum(at - saved * cycle, step)
        last_turn = np.floor(saved / pattern.saves_per_turn) * pattern.saves_per_turn * step
        count[alive] += 1
        since_turn[alive] += np.maximum(0, trained - last_turn)
    return _summarize(
        save_hours=saves * save_hours,
        load_hours=costs.load_shard_hours,
        reschedule_hours=costs.reschedule_hours,
        count=count,
        lost=np.zeros(histories),
        pls=since_turn / job.total_hours * (job.shards_per_failure / job.num_shards),
    )


def require_playable(histories: int, failures: float) -> None:
    """Raise UsageError for too few histories, or for too many failures in all."""
    if histories < 2:
        raise UsageError(f"histories is {histories}; at least 2 are needed for a standard error")
    if histories * failures > _MOST_FAILURES:
        raise UsageError(
            f"{histories} histories of about {failures:.3g} failures each are too many to play; "
            f"needed: at most {_MOST_FAILURES} failures in all. Play fewer histories, or take a "
            "constant rate"
        )


def _summarize(
    *,
    save_hours: float,
    load_hours: float,
    reschedule_hours: float,
    count: FloatArray,
    lost: FloatArray,
    pls: FloatArray,
) -> Simulated:
    failures = float(count.mean())
    overhead = Overhead(
        save_hours=save_hours,
        load_hours=load_hours * failures,
        lost_computation_hours=float(lost.mean()),
        reschedule_hours=reschedule_hours * failures,
    )
    return Simulated(
        overhead=overhead,
        failures=failures,
        pls=float(pls.mean()),
        total_standard_error_hours=standard_error(lost + (load_hours + reschedule_hours) * count),
        pls_standard_error=standard_error(pls),
        histories=len(count),
    )


def standard_error(values: FloatArray) -> float:
    """Return the standard error of the mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values)))
