"""The chance that a parity group loses a second worker before the first is rebuilt (derived).

Failures of the job come at a constant rate; each takes ``shards_per_failure`` different shards,
all equally likely. A group is unprotected from the loss until its replacement has the rows, and
the parity that it held is encoded again. That time passes whether training continues or not. A
replacement that is lost again restarts the time, and no other rows are lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cpr_ext.wings.policy.checks import require_not_negative, require_positive
from cpr_ext.wings.policy.costs import JobSize


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
    job: JobSize, mtbf_hours: float, group_size: int, unprotected_hours: float
) -> SecondLoss:
    """Return what a failure leads to that finds all groups whole.

    A second loss within the window ``w`` has the chance ``(1 - E)*b/(b + a*E)``, with ``E =
    exp(-(a + b)*w)``. Failures that take only what is already lost have the rate ``a``; those that
    take another worker of the group have the rate ``b``. Exact for one shard per failure.

    Args:
        mtbf_hours: mean time between failures of the job.
        unprotected_hours: from a loss until the group is whole, if nothing more happens.

    Raises:
        UsageError: a time is out of range.
    """
    require_positive({"mtbf_hours": mtbf_hours})
    require_not_negative({"unprotected_hours": unprotected_hours})
    count = job.shards_per_failure
    peers = count * (group_size - 1)
    hits_peer = 1 - _chance_of_none(job.num_shards, peers, count)
    hits_any = 1 - _chance_of_none(job.num_shards, peers + count, count)
    a, b = (hits_any - hits_peer) / mtbf_hours, hits_peer / mtbf_hours
    ends = -math.expm1(-(a + b) * unprotected_hours)  # 1 - E
    left = b + a * (1 - ends)
    meanwhile = ends * b / left if left else 0.0
    hours = ends / left if left else unprotected_hours
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
    job: JobSize, mtbf_hours: float, group_size: int, unprotected_hours: float
) -> float:
    """Return the mean time until parity does not suffice, of the whole job; infinite: never.

    A group is whole for ``1/(rate of its losses)`` hours, then unprotected. Its cycles are
    independent of those of the other groups.

    Raises:
        UsageError: a time is out of range.
    """
    loss = second_loss(job, mtbf_hours, group_size, unprotected_hours)
    if not loss.chance:
        return math.inf
    groups = job.num_shards / group_size
    whole_hours = mtbf_hours * groups / job.shards_per_failure
    cycle_hours = whole_hours + loss.unprotected_hours
    return mtbf_hours / loss.chance * (cycle_hours / whole_hours)


def chance_of_fallback(
    job: JobSize, mtbf_hours: float, group_size: int, unprotected_hours: float
) -> float:
    """Return the chance that parity does not suffice once or more in the job.

    Raises:
        UsageError: a time is out of range.
    """
    mean = mean_hours_between_fallbacks(job, mtbf_hours, group_size, unprotected_hours)
    return -math.expm1(-job.total_hours / mean)


def _chance_of_none(shards: int, marked: int, drawn: int) -> float:
    """Return the chance that ``drawn`` of ``shards`` shards are all unmarked."""
    chance = 1.0
    for number in range(drawn):
        chance *= max(0, shards - marked - number) / (shards - number)
    return chance
