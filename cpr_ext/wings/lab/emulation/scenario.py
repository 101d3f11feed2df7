"""What happens to the cluster: how long the job is, what fails when, and what it costs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.emulation.strategies import (
    PRIORITIZED,
    EmulatedRounding,
    EmulatedStrategy,
    EmulatedStrategyName,
)
from cpr_ext.wings.policy import (
    FailureModel,
    JobCosts,
    JobSize,
    ParityCosts,
    Planner,
    draw_failure_times,
    interval_for_pls,
    young_interval_hours,
)

# Failures are drawn from a stream of their own, so that no other use of the seed moves them.
_FAILURE_STREAM = 0xFA11


@dataclass(frozen=True)
class DrawnFailure:
    """At ``hour`` of useful training, ``shards`` are lost."""

    hour: float
    shards: tuple[int, ...]


@dataclass(frozen=True)
class Scenario:
    """A job on a cluster.

    Attributes:
        name: for reports.
        job: useful hours, shards (each on an embedding server of its own), shards per failure.
        failure_model: hours from one failure to the next.
        costs: of a save of all rows, of loading and of rescheduling.
        pls_target: from which CPR derives its interval.
        num_failures: exactly so many, at hours drawn uniformly over the job (as those of an
            exponential model are, given their number); None: drawn from ``failure_model``.
        num_trainers: trainer nodes; for reports only, since a lost trainer loses no row.
        fraction: r, the share of the rows that CPR-SCAR, -MFU and -SSU save at a time.
        tracking_share: what noting accesses or changes adds to training time, as a share of it, for
            strategies that recover partially.
        parity: what parity in peers' memory costs; None: no strategy has it.
        rounding: of the rows that CPR-SCAR, -MFU and -SSU save; None: they are exact.

    Raises:
        UsageError: a number out of its range.
    """

    name: str
    job: JobSize
    failure_model: FailureModel
    costs: JobCosts
    pls_target: float
    num_failures: int | None = None
    num_trainers: int = 0
    fraction: float = 0.125
    tracking_share: float = 0.0
    parity: ParityCosts | None = None
    rounding: EmulatedRounding | None = None

    def __post_init__(self) -> None:
        for name, value in (("pls_target", self.pls_target), ("fraction", self.fraction)):
            if not 0 < value <= 1:
                raise UsageError(f"{self.name}: {name} is {value}; allowed: above 0, at most 1")
        for name in ("num_failures", "num_trainers", "tracking_share"):
            if (getattr(self, name) or 0) < 0:
                raise UsageError(
                    f"{self.name}: {name} is {getattr(self, name)}; it must not be negative"
                )

    def draw_failures(self, seed: int) -> list[DrawnFailure]:
        """Return the failures of a seed, in the order of time; the same for every strategy."""
        rng = np.random.default_rng([seed, _FAILURE_STREAM])
        hours = (
            draw_failure_times(self.failure_model, self.job.total_hours, rng)
            if self.num_failures is None
            else np.sort(rng.uniform(0, self.job.total_hours, self.num_failures))
        )
        return [DrawnFailure(float(hour), self._draw_shards(rng)) for hour in hours]

    def _draw_shards(self, rng: np.random.Generator) -> tuple[int, ...]:
        count = self.job.shards_per_failure
        shards = rng.choice(self.job.num_shards, size=count, replace=False)
        return tuple(sorted(int(shard) for shard in shards))

    @property
    def mtbf_hours(self) -> float:
        """Mean time between failures."""
        return self.failure_model.mean_hours

    @property
    def full_interval_hours(self) -> float:
        """T_save at which full recovery costs least, at most the job's length."""
        interval = young_interval_hours(self.costs.save_hours, self.mtbf_hours)
        return min(self.job.total_hours, interval)

    @property
    def cpr_interval_hours(self) -> float:
        """T_save at which the expected PLS is ``pls_target``, at most the job's length."""
        return interval_for_pls(self.job, self.mtbf_hours, self.pls_target)

    @property
    def parity_interval_hours(self) -> float:
        """T_save with parity, whose saves serve double losses only; at most the job's length."""
        parity = self.require_parity()
        planner = Planner(self.job, self.costs, self.failure_model, parity=parity)
        strategies = planner.parity_strategies()
        assert strategies is not None
        return strategies.interval_hours(self.pls_target)

    def require_parity(self) -> ParityCosts:
        """Return what parity costs.

        Raises:
            UsageError: the scenario has none.
        """
        if self.parity is None:
            raise UsageError("the strategy 'parity' needs a group size; give --parity-group-size")
        return self.parity

    def strategy(self, name: EmulatedStrategyName) -> EmulatedStrategy:
        """Return a strategy with its interval here."""
        if name == "no-failure":
            return EmulatedStrategy(name, math.inf)
        if name in ("full", "partial"):
            return EmulatedStrategy(name, self.full_interval_hours)
        if name == "parity":
            return EmulatedStrategy(name, self.parity_interval_hours)
        interval = self.cpr_interval_hours
        if name not in PRIORITIZED:
            return EmulatedStrategy(name, interval)
        if self.rounding is not None and self.rounding.spends_bytes:
            interval *= self.rounding.row_share
        return EmulatedStrategy(name, interval, self.fraction, self.rounding)

    def to_plain(self) -> dict[str, Any]:
        """Return JSON values, for a person and for comparing; there is no way back."""
        plain = asdict(self)
        plain["failure_model"]["model"] = type(self.failure_model).__name__
        return plain
