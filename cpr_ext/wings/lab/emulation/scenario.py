"""What happens to the cluster, and how a job protects itself against it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cpr_ext import (
    AllRows,
    LargestChange,
    MostFrequentlyUsed,
    Priority,
    SubSampledUsed,
)
from cpr_ext.errors import UsageError
from cpr_ext.wings.policy import (
    JobCosts,
    JobSize,
    ParityCosts,
    interval_for_pls,
    young_interval_hours,
)
from cpr_ext.wings.policy.costs import require_positive
from cpr_ext.wings.policy.parity import parity_interval_hours
from cpr_ext.wings.policy.presets import find_preset

EmulatedStrategyName = Literal[
    "no-failure", "full", "partial", "cpr-vanilla", "cpr-scar", "cpr-mfu", "cpr-ssu", "parity"
]
#: In the order of the tables and pictures.
STRATEGIES: dict[EmulatedStrategyName, str] = {
    "no-failure": "no failure",
    "full": "full recovery",
    "partial": "partial recovery",
    "cpr-vanilla": "CPR-vanilla",
    "cpr-scar": "CPR-SCAR",
    "cpr-mfu": "CPR-MFU",
    "cpr-ssu": "CPR-SSU",
    "parity": "parity",
}
#: The strategies that save the rows of highest priority first, a fraction at a time.
PRIORITIZED: tuple[EmulatedStrategyName, ...] = ("cpr-scar", "cpr-mfu", "cpr-ssu")


@dataclass(frozen=True)
class EmulatedStrategy:
    """One strategy with its interval in a scenario.

    Attributes:
        name: see :data:`STRATEGIES`.
        interval_hours: T_save, in which the bytes of one save of all rows are written; infinite if
            nothing is saved.
        fraction: share of the rows that one save writes, r; a save starts every ``fraction *
            interval_hours``.
    """

    name: EmulatedStrategyName
    interval_hours: float
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if not self.interval_hours > 0:
            raise UsageError(f"{self.name}: the interval is {self.interval_hours} hours")
        if not 0 < self.fraction <= 1:
            raise UsageError(f"{self.name}: fraction is {self.fraction}; allowed: above 0 to 1")

    @property
    def label(self) -> str:
        """As people call it."""
        return STRATEGIES[self.name]

    @property
    def save_every_hours(self) -> float:
        """Hours from the start of one save to that of the next."""
        return self.fraction * self.interval_hours

    @property
    def recovery(self) -> Literal["full", "partial", "exact", "none"]:
        """How lost shards are recovered; ``none``: there are no failures."""
        if self.name == "no-failure":
            return "none"
        if self.name == "parity":
            return "exact"
        return "full" if self.name == "full" else "partial"

    def priority(self, seed: int) -> Priority | None:
        """Return the priority of its snapshots, or None; ``seed`` is of SSU's sampling."""
        match self.name:
            case "no-failure":
                return None
            case "cpr-scar":
                return LargestChange(self.fraction)
            case "cpr-mfu":
                return MostFrequentlyUsed(self.fraction)
            case "cpr-ssu":
                return SubSampledUsed(self.fraction, seed=seed)
        return AllRows()


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
        mtbf_hours: mean time between failures, at a constant rate.
        costs: of a save of all rows, of loading and of rescheduling.
        pls_target: from which CPR derives its interval.
        num_failures: exactly so many, at hours drawn uniformly over the job (as those at a constant
            rate are, given their number); None: the number is drawn too.
        fraction: r, the share of the rows that CPR-SCAR, -MFU and -SSU save at a time.
        parity: what parity in peers' memory costs; None: no strategy has it.

    Raises:
        UsageError: a number out of its range.
    """

    name: str
    job: JobSize
    mtbf_hours: float
    costs: JobCosts
    pls_target: float
    num_failures: int | None = None
    fraction: float = 0.125
    parity: ParityCosts | None = None

    def __post_init__(self) -> None:
        require_positive({"mtbf_hours": self.mtbf_hours})
        for name, value in (("pls_target", self.pls_target), ("fraction", self.fraction)):
            if not 0 < value <= 1:
                raise UsageError(f"{self.name}: {name} is {value}; allowed: above 0, at most 1")
        if (self.num_failures or 0) < 0:
            raise UsageError(
                f"{self.name}: num_failures is {self.num_failures}; it must not be negative"
            )

    def draw_failures(self, seed: int) -> list[DrawnFailure]:
        """Return the failures of a seed, in the order of time; the same for every strategy."""
        rng = np.random.default_rng([seed, _FAILURE_STREAM])
        total = self.job.total_hours
        if self.num_failures is not None:
            hours = np.sort(rng.uniform(0, total, self.num_failures))
        else:
            hours, chunk = np.zeros(1), max(8, int(1.5 * total / self.mtbf_hours) + 8)
            while hours[-1] < total:
                drawn = np.cumsum(rng.exponential(self.mtbf_hours, chunk))
                hours = np.concatenate((hours, hours[-1] + drawn))
            hours = hours[1:][hours[1:] < total]
        return [DrawnFailure(float(hour), self._draw_shards(rng)) for hour in hours]

    def _draw_shards(self, rng: np.random.Generator) -> tuple[int, ...]:
        count = self.job.shards_per_failure
        shards = rng.choice(self.job.num_shards, size=count, replace=False)
        return tuple(sorted(int(shard) for shard in shards))

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
        given = (self.costs, self.job, parity, self.mtbf_hours)
        return parity_interval_hours(*given, self.pls_target)

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
        return EmulatedStrategy(name, interval, self.fraction)


def find_scenario(name: str) -> Scenario:
    """Return a preset of the policy as a scenario.

    Raises:
        UsageError: there is none of that name.
    """
    preset = find_preset(name)
    return Scenario(
        name=preset.name,
        job=preset.job,
        mtbf_hours=preset.mtbf_hours,
        costs=preset.costs,
        pls_target=preset.target_pls,
        # The production run that the paper's poster tells had this many; the other draws.
        num_failures=5 if name == "production-50h" else None,
    )
