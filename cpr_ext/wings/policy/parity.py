"""Parity in peers' memory: what it costs, and how often it does not suffice.

Groups of ``g = k + 1`` workers hold the XOR of each other's rows, as ECRM does (arXiv 2104.01981);
``g = 2`` is a mirror. The formulas are derived, for bits and rotating parity. A failure that parity
makes good loses nothing: all workers return to one step, at most two steps back, which are not
counted. Where it does not suffice, lost shards load their newest save from the store and training
continues, as in partial recovery: a *fallback*.

Failures of the job come at a constant rate; each takes ``shards_per_failure`` different shards, all
equally likely. A group is unprotected from the loss until its replacement has the rows, and the
parity that it held is encoded again. That time passes whether training continues or not. A
replacement that is lost again restarts the time, and no other rows are lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy.costs import (
    ALL_ROWS,
    JobCosts,
    JobSize,
    SavePattern,
    require_not_negative,
    require_positive,
)
from cpr_ext.wings.policy.expectation import (
    Expectation,
    expected_partial_recovery,
    young_interval_hours,
)
from cpr_ext.wings.policy.pls import interval_for_pls

# A month; the chance that parity does not suffice is stated for it, whatever the job's length.
MONTH_HOURS = 730.0


@dataclass(frozen=True)
class ParityCosts:
    """What parity costs a job.

    Attributes:
        group_size: workers in a group, ``g``; any one of them can be rebuilt from the others.
        steady_share: training time that sending deltas adds, as a share of it.
        rebuild_hours: to decode the rows of a lost worker and to encode again the parity that it
            held, once its replacement has started.
        rebuild_stall: how much of training speed is lost meanwhile; 1: training stands still.
    """

    group_size: int
    steady_share: float
    rebuild_hours: float
    rebuild_stall: float = 1.0

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise UsageError(f"group_size is {self.group_size}; it must be 2 (a mirror) or more")
        require_not_negative(
            {"steady_share": self.steady_share, "rebuild_hours": self.rebuild_hours}
        )
        if not 0 <= self.rebuild_stall <= 1:
            raise UsageError(f"rebuild_stall is {self.rebuild_stall}; it is a share: 0 to 1")

    @property
    def name(self) -> str:
        """``mirror``, or data and parity such as ``3 + 1``."""
        return "mirror" if self.group_size == 2 else f"{self.group_size - 1} + 1"

    def require_fit(self, num_shards: int) -> None:
        """Raise UsageError unless groups of this size fit ``num_shards`` workers."""
        if num_shards % self.group_size:
            sizes = [size for size in range(2, num_shards + 1) if num_shards % size == 0]
            raise UsageError(
                f"a parity group of {self.group_size} does not fit {num_shards} shards, which must "
                f"be a multiple of it; possible here: {sizes or 'none'}"
            )


def extra_memory_share(group_size: int) -> float:
    """Return the memory for parity, as a share of that for rows and their state: ``1/k``."""
    return 1 / (group_size - 1)


def rebuild_hours(shard_bytes: float, group_size: int, link_bytes_per_second: float) -> float:
    """Return the time to rebuild a shard at the speed of one link: ``(1 + 1/k)*shard/link``.

    ``k`` reduces of ``1/k`` of a shard each decode it: no link carries more than about a shard.
    One more of ``1/k`` encodes the parity that the lost worker held.

    Args:
        shard_bytes: rows of one worker, with their state.

    Raises:
        UsageError: a figure is not above 0.
    """
    require_positive({"shard_bytes": shard_bytes, "link_bytes_per_second": link_bytes_per_second})
    moved = shard_bytes * (1 + extra_memory_share(group_size))
    return moved / link_bytes_per_second / 3600


def unprotected_hours(costs: JobCosts, parity: ParityCosts) -> float:
    """Return the time from a loss until the group is whole: replace, decode, encode."""
    return costs.reschedule_hours + parity.rebuild_hours


@dataclass(frozen=True)
class SecondLoss:
    """What one failure of a job that has parity leads to.

    Attributes:
        together: chance that it takes two workers of one group at once.
        meanwhile: chance that another failure takes a second worker of a group in time.
        unprotected_hours: expected time until the group is whole again, or has fallen back.
        shards_lost: expected number of shards that then come from the store, if parity does not
            suffice.
    """

    together: float
    meanwhile: float
    unprotected_hours: float
    shards_lost: float

    @property
    def chance(self) -> float:
        """That parity does not suffice."""
        return self.together + (1 - self.together) * self.meanwhile


def chance_together(job: JobSize, group_size: int) -> float:
    """Return the chance that one failure takes two or more workers of one group.

    Drawn one after the other, each shard must be of a group that none before it is of.
    """
    apart = 1.0
    for taken in range(job.shards_per_failure):
        apart *= max(0.0, job.num_shards - taken * group_size) / (job.num_shards - taken)
    return 1 - apart


def second_loss(
    job: JobSize, mtbf_hours: float, group_size: int, window_hours: float
) -> SecondLoss:
    """Return what a failure leads to that finds all groups whole.

    A second loss within the window ``w`` has the chance ``(1 - E)*b/(b + a*E)``, with ``E =
    exp(-(a + b)*w)``. Failures that take only what is already lost have the rate ``a``; those that
    take another worker of the group have the rate ``b``. Exact for one shard per failure.

    Args:
        mtbf_hours: mean time between failures of the job.
        window_hours: from a loss until the group is whole, if nothing more happens.

    Raises:
        UsageError: a time is out of range.
    """
    require_positive({"mtbf_hours": mtbf_hours})
    require_not_negative({"unprotected_hours": window_hours})
    count = job.shards_per_failure
    peers = count * (group_size - 1)
    hits_peer = 1 - _chance_of_none(job.num_shards, peers, count)
    hits_any = 1 - _chance_of_none(job.num_shards, peers + count, count)
    a, b = (hits_any - hits_peer) / mtbf_hours, hits_peer / mtbf_hours
    ends = -math.expm1(-(a + b) * window_hours)  # 1 - E
    left = b + a * (1 - ends)
    meanwhile = ends * b / left if left else 0.0
    hours = ends / left if left else window_hours
    together = chance_together(job, group_size)
    either = together + (1 - together) * meanwhile
    # Each group falls back alone. A lost shard has another one of its group among those lost with
    # it, or one that is lost in time; then both come from the store.
    shares = 1 - _chance_of_none(job.num_shards - 1, group_size - 1, count - 1)
    follows = 1 - _chance_of_none(job.num_shards, group_size - 1, count)
    second = follows + count * (group_size - 1) / job.num_shards  # the shard, and those that follow
    both = count * shares + (1 - together) * meanwhile * count * second / hits_peer
    shards_lost = min(job.num_shards, both / either) if either else 0.0
    return SecondLoss(together, meanwhile, hours, shards_lost)


def mean_hours_between_fallbacks(
    job: JobSize, mtbf_hours: float, group_size: int, window_hours: float
) -> float:
    """Return the mean time until parity does not suffice, of the whole job; infinite: never.

    A group is whole for ``1/(rate of its losses)`` hours, then unprotected. Its cycles are
    independent of those of the other groups.

    Raises:
        UsageError: a time is out of range.
    """
    loss = second_loss(job, mtbf_hours, group_size, window_hours)
    if not loss.chance:
        return math.inf
    groups = job.num_shards / group_size
    whole_hours = mtbf_hours * groups / job.shards_per_failure
    cycle_hours = whole_hours + loss.unprotected_hours
    return mtbf_hours / loss.chance * (cycle_hours / whole_hours)


def chance_of_fallback(
    job: JobSize, mtbf_hours: float, group_size: int, window_hours: float
) -> float:
    """Return the chance that parity does not suffice once or more in the job.

    Raises:
        UsageError: a time is out of range.
    """
    mean = mean_hours_between_fallbacks(job, mtbf_hours, group_size, window_hours)
    return -math.expm1(-job.total_hours / mean)


def _chance_of_none(shards: int, marked: int, drawn: int) -> float:
    """Return the chance that ``drawn`` of ``shards`` shards are all unmarked."""
    chance = 1.0
    for number in range(drawn):
        chance *= max(0, shards - marked - number) / (shards - number)
    return chance


@dataclass(frozen=True)
class ParityExpectation(Expectation):
    """Mean over failure histories.

    Attributes:
        fallbacks: number of failures that parity did not make good.
        fallback_chance: that there is one or more.
    """

    fallbacks: float
    fallback_chance: float


def expected_parity(
    costs: JobCosts,
    job: JobSize,
    parity: ParityCosts,
    mtbf_hours: float,
    interval_hours: float,
    *,
    pattern: SavePattern = ALL_ROWS,
) -> ParityExpectation:
    """Return the overhead with parity, and saves every ``interval_hours`` for fallbacks.

    Raises:
        UsageError: a time is not above 0, or the groups do not fit.
    """
    parity.require_fit(job.num_shards)
    partial = expected_partial_recovery(costs, job, mtbf_hours, interval_hours, pattern=pattern)
    given = (job, mtbf_hours, parity.group_size, unprotected_hours(costs, parity))
    loss, between = second_loss(*given), mean_hours_between_fallbacks(*given)
    fallbacks = job.total_hours / between
    lost_shards = loss.shards_lost / job.shards_per_failure
    overhead = replace(
        partial.overhead,
        load_hours=partial.failures * parity.rebuild_stall * parity.rebuild_hours
        + fallbacks * costs.load_shard_hours,
        parity_hours=parity.steady_share * job.total_hours,
    )
    return ParityExpectation(
        overhead=overhead,
        failures=partial.failures,
        pls=partial.pls * fallbacks / partial.failures * lost_shards,
        fallbacks=fallbacks,
        fallback_chance=-math.expm1(-fallbacks),
    )


def parity_interval_hours(
    costs: JobCosts, job: JobSize, parity: ParityCosts, mtbf_hours: float, target_pls: float
) -> float:
    """Return how often parity alone saves all rows.

    It is the best interval of full recovery if fallbacks were the only failures, or CPR's if that
    is longer. Where the target for expected PLS requires it, it is shorter. It is at most the job.
    """
    given = (job, mtbf_hours, parity.group_size, unprotected_hours(costs, parity))
    between = mean_hours_between_fallbacks(*given)
    if math.isinf(between):
        return job.total_hours
    lost = math.ceil(second_loss(*given).shards_lost)
    fallback = JobSize(job.total_hours, job.num_shards, lost)
    by_pls = interval_for_pls(fallback, between, target_pls)
    without = interval_for_pls(job, mtbf_hours, target_pls)
    return min(by_pls, max(without, young_interval_hours(costs.save_hours, between)))


def describe_parity(costs: JobCosts, job: JobSize, parity: ParityCosts, mtbf_hours: float) -> str:
    """Return what parity costs besides time, and how often it does not suffice."""
    window = unprotected_hours(costs, parity)
    month = JobSize(MONTH_HOURS, job.num_shards, job.shards_per_failure)
    chance = chance_of_fallback(month, mtbf_hours, parity.group_size, window)
    # Two digits; one that rounds to certainty is not called so.
    percent = "more than 99 %" if chance > 0.99 else f"{100 * chance:.2g} %"
    return (
        f"Parity {parity.name}: {100 * extra_memory_share(parity.group_size):.3g} % more memory "
        f"for rows and their state. A group is unprotected for {60 * window:.3g} min after a loss. "
        "The chance that a group loses two workers at once, or a second in that time, and rows "
        f"come from the store, is {percent} in a month of {MONTH_HOURS:g} h."
    )
