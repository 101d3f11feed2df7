"""The reference for parity: failure histories played loss by loss, by the rules of the protocol.

Plain loops over groups and their lost shards, so that they can be read. Holds for any
:class:`~cpr_ext.wings.policy.FailureModel`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cpr_ext.wings.policy.checks import require_positive
from cpr_ext.wings.policy.costs import ALL_ROWS, JobCosts, JobSize, SavePattern
from cpr_ext.wings.policy.expectation import FailureClock, require_clock
from cpr_ext.wings.policy.failure_models import FailureModel, FloatArray, draw_failure_times
from cpr_ext.wings.policy.overhead import Overhead
from cpr_ext.wings.policy.parity_costs import ParityCosts
from cpr_ext.wings.policy.parity_expectation import unprotected_hours
from cpr_ext.wings.policy.pls import whole_saves
from cpr_ext.wings.policy.simulation import Simulated, require_playable, standard_error

DEFAULT_HISTORIES = 500


@dataclass(frozen=True)
class SimulatedParity(Simulated):
    """Means over the histories; the first two as in ``ParityExpectation``.

    Attributes:
        chance_standard_error: of ``fallback_chance``.
    """

    fallbacks: float
    fallback_chance: float
    chance_standard_error: float


@dataclass
class PlayedGroups:
    """The parity groups of a job while failures strike.

    Attributes:
        window_hours: from a loss until its group is whole again.
    """

    group_size: int
    window_hours: float
    _until: dict[int, float] = field(default_factory=dict)
    _lost: dict[int, set[int]] = field(default_factory=dict)
    _no_parity: set[int] = field(default_factory=set)

    def lose(self, hour: float, shards: list[int]) -> set[int]:
        """Take a failure; return the shards that the store must serve, empty: parity suffices."""
        for group in [group for group, until in self._until.items() if until <= hour]:
            del self._until[group], self._lost[group]
            self._no_parity.discard(group)
        for shard in shards:
            group = shard // self.group_size
            self._lost.setdefault(group, set()).add(shard)
            self._until[group] = hour + self.window_hours
        struck = {shard // self.group_size for shard in shards}
        unable = [g for g in struck if len(self._lost[g]) > 1 or g in self._no_parity]
        served = set().union(*(self._lost[group] for group in unable))
        for group, lost in self._lost.items() if unable else ():
            lost.clear()  # its rows are back, its parity is encoded again
            self._until[group] = hour + self.window_hours
            self._no_parity.add(group)
        return served


def draw_shards(job: JobSize, failures: int, rng: np.random.Generator) -> list[list[int]]:
    """Return the shards that each failure takes."""
    if job.shards_per_failure == 1:
        return [[shard] for shard in rng.integers(job.num_shards, size=failures).tolist()]
    count = job.shards_per_failure
    return [rng.choice(job.num_shards, count, replace=False).tolist() for _ in range(failures)]


def simulate_parity(
    costs: JobCosts,
    job: JobSize,
    parity: ParityCosts,
    failures: FailureModel,
    interval_hours: float,
    *,
    pattern: SavePattern = ALL_ROWS,
    clock: FailureClock = "training",
    histories: int = DEFAULT_HISTORIES,
    seed: int = 0,
) -> SimulatedParity:
    """Play losses, second losses and fallbacks.

    Raises:
        UsageError: a time is not above 0, the groups do not fit, or too many failures to play.
    """
    require_positive({"interval_hours": interval_hours})
    require_clock(clock)
    parity.require_fit(job.num_shards)
    every = pattern.save_every_hours(interval_hours)
    save_hours = pattern.cost_share * costs.save_hours
    saves = whole_saves(job.total_hours, every)
    pause = save_hours if clock == "running" else 0.0
    running = job.total_hours + saves * pause
    require_playable(histories, running / failures.mean_hours)
    rng = np.random.default_rng(seed)
    count, fallbacks, pls = np.zeros(histories), np.zeros(histories), np.zeros(histories)
    for history in range(histories):
        groups = PlayedGroups(parity.group_size, unprotected_hours(costs, parity))
        hours = draw_failure_times(failures, running, rng)
        count[history] = hours.size
        for hour, shards in zip(hours.tolist(), draw_shards(job, hours.size, rng), strict=True):
            if served := groups.lose(hour, shards):
                fallbacks[history] += 1
                saved = min(hour // (every + pause), saves)
                trained = saved * every + min(hour - saved * (every + pause), every)
                turn = saved // pattern.saves_per_turn * pattern.saves_per_turn * every
                pls[history] += max(0.0, trained - turn) * len(served)
    pls /= job.total_hours * job.num_shards
    return _summarize(costs, job, parity, saves * save_hours, count, fallbacks, pls)


def _summarize(
    costs: JobCosts,
    job: JobSize,
    parity: ParityCosts,
    save_hours: float,
    count: FloatArray,
    fallbacks: FloatArray,
    pls: FloatArray,
) -> SimulatedParity:
    load = parity.rebuild_stall * parity.rebuild_hours * count + costs.load_shard_hours * fallbacks
    overhead = Overhead(
        save_hours=save_hours,
        load_hours=float(load.mean()),
        lost_computation_hours=0.0,
        reschedule_hours=costs.reschedule_hours * float(count.mean()),
        parity_hours=parity.steady_share * job.total_hours,
    )
    fell_back = (fallbacks > 0).astype(float)
    return SimulatedParity(
        overhead=overhead,
        failures=float(count.mean()),
        pls=float(pls.mean()),
        total_standard_error_hours=standard_error(load + costs.reschedule_hours * count),
        pls_standard_error=standard_error(pls),
        histories=len(count),
        fallbacks=float(fallbacks.mean()),
        fallback_chance=float(fell_back.mean()),
        chance_standard_error=standard_error(fell_back),
    )
