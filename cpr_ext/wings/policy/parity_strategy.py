"""Parity as a strategy of a plan: alone, and in front of CPR's snapshots."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cpr_ext.wings.policy.costs import ALL_ROWS, JobCosts, JobSize, SavePattern
from cpr_ext.wings.policy.expectation import FailureClock
from cpr_ext.wings.policy.failure_models import FailureModel
from cpr_ext.wings.policy.overhead import young_interval_hours
from cpr_ext.wings.policy.parity_costs import ParityCosts, extra_memory_share
from cpr_ext.wings.policy.parity_expectation import (
    ParityExpectation,
    expected_parity,
    unprotected_hours,
)
from cpr_ext.wings.policy.parity_simulation import SimulatedParity, simulate_parity
from cpr_ext.wings.policy.pls import interval_for_pls
from cpr_ext.wings.policy.second_loss import mean_hours_between_fallbacks, second_loss
from cpr_ext.wings.policy.strategy import PriorityName, Strategy, StrategyName

# A month; the chance that parity does not suffice is stated for it, whatever the job's length.
MONTH_HOURS = 730.0


@dataclass(frozen=True)
class ParityStrategies:
    """The strategies that parity adds to a plan.

    Attributes:
        pattern: how CPR's priority saves.
        histories: to simulate, where failures do not come at a constant rate; 0: formulas hold.
        bytes_per_hour: what saves write, by interval and pattern.
    """

    job: JobSize
    costs: JobCosts
    parity: ParityCosts
    failures: FailureModel
    pattern: SavePattern
    clock: FailureClock
    histories: int
    seed: int
    bytes_per_hour: Callable[[float, SavePattern], float | None]

    def alone(self, target_pls: float) -> Strategy:
        """Save all rows, only as often as fallbacks require."""
        return self.saving_every("parity", "all", self.interval_hours(target_pls), ALL_ROWS)

    def before_cpr(self, cpr_interval_hours: float) -> Strategy:
        """Save the most used rows as CPR does without parity; fallbacks read these snapshots."""
        return self.saving_every("parity + CPR", "mfu", cpr_interval_hours, self.pattern)

    def interval_hours(self, target_pls: float) -> float:
        """Return how often parity alone saves all rows.

        It is the best interval of full recovery if fallbacks were the only failures, or CPR's if
        that is longer. Where the target for expected PLS requires it, it is shorter. It is at most
        the job.
        """
        between = self._mean_hours_between_fallbacks()
        if math.isinf(between):
            return self.job.total_hours
        lost = math.ceil(second_loss(*self._groups()).shards_lost)
        fallback = JobSize(self.job.total_hours, self.job.num_shards, lost)
        by_pls = interval_for_pls(fallback, between, target_pls)
        without = interval_for_pls(self.job, self.failures.mean_hours, target_pls)
        return min(by_pls, max(without, young_interval_hours(self.costs.save_hours, between)))

    def notes(self) -> tuple[str, ...]:
        """Return what parity costs besides time, and how often it does not suffice."""
        parity, between = self.parity, self._mean_hours_between_fallbacks()
        chance = -math.expm1(-MONTH_HOURS / between)
        return (
            f"Parity {parity.name}: {100 * extra_memory_share(parity.group_size):.3g} % more "
            f"memory for rows and their state. A group is unprotected for "
            f"{60 * unprotected_hours(self.costs, parity):.3g} min after a loss. The chance that a "
            f"group loses two workers at once, or a second in that time, and rows come from the "
            f"store, is {_percent(chance)} in a month of {MONTH_HOURS:g} h.",
        )

    def _mean_hours_between_fallbacks(self) -> float:
        return mean_hours_between_fallbacks(*self._groups())

    def _groups(self) -> tuple[JobSize, float, int, float]:
        window = unprotected_hours(self.costs, self.parity)
        return self.job, self.failures.mean_hours, self.parity.group_size, window

    def saving_every(
        self, name: StrategyName, priority: PriorityName, interval: float, pattern: SavePattern
    ) -> Strategy:
        """Return parity with all rows saved once in ``interval`` hours, by a pattern."""
        given = (self.costs, self.job, self.parity)
        expected: ParityExpectation | SimulatedParity
        formula = expected_parity(*given, self.failures.mean_hours, interval, pattern=pattern)
        if self.histories:
            expected = simulate_parity(
                *given,
                self.failures,
                interval,
                pattern=pattern,
                clock=self.clock,
                histories=self.histories,
                seed=self.seed,
            )
        else:
            expected = expected_parity(
                *given, self.failures.mean_hours, interval, pattern=pattern, clock=self.clock
            )
        return Strategy(
            name=name,
            recovery="exact",
            priority=priority,
            interval_hours=interval,
            save_every_hours=pattern.save_every_hours(interval),
            fraction=pattern.fraction,
            expected=expected,
            overhead_fraction=expected.overhead.fraction_of(self.job),
            formula_overhead_fraction=formula.overhead.fraction_of(self.job),
            bytes_per_hour=self.bytes_per_hour(interval, pattern),
            fallback_chance=expected.fallback_chance,
        )


def _percent(chance: float) -> str:
    """Return a chance in percent, two digits; one that rounds to certainty is not called so."""
    return "more than 99 %" if chance > 0.99 else f"{100 * chance:.2g} %"
