"""What checkpoints and failures cost a job, as the paper accounts it.

Formulas of CPR (Maeng et al., MLSys 2021), re-derived; Young's interval is of J. W. Young, CACM
17(9), 1974. They take ``T_total/T_save`` saves and ``T_total/T_fail`` failures, whole or not: right
where the job is long against both, and the interval short against the MTBF.
:mod:`cpr_ext.wings.policy.expectation` has what holds without that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cpr_ext.wings.policy.checks import require_not_negative, require_positive
from cpr_ext.wings.policy.costs import JobCosts, JobSize


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
        return (
            self.save_hours
            + self.load_hours
            + self.lost_computation_hours
            + self.reschedule_hours
            + self.parity_hours
        )

    def fraction_of(self, job: JobSize) -> float:
        """Return the total as a share of the job's useful training time; it may pass 1."""
        return self.total_hours / job.total_hours


def full_recovery(
    costs: JobCosts, job: JobSize, mtbf_hours: float, interval_hours: float
) -> Overhead:
    """Return the overhead if all shards return to the last save and train again:
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
    """Return the overhead if only lost shards are loaded and training continues:
    ``O_save*T/T_save + (O_load_shard + O_resched)*T/T_fail``.

    A priority that saves a share ``r`` of the rows every ``r*T_save`` costs the same.

    Args:
        mtbf_hours: mean time between failures of the job as a whole, ``T_fail``.
        interval_hours: useful training in which as many rows are saved as there are, ``T_save``.

    Raises:
        UsageError: a time is not above 0.
    """
    require_positive({"mtbf_hours": mtbf_hours, "interval_hours": interval_hours})
    failures = job.total_hours / mtbf_hours
    return Overhead(
        save_hours=costs.save_hours * job.total_hours / interval_hours,
        load_hours=costs.load_shard_hours * failures,
        lost_computation_hours=0.0,
        reschedule_hours=costs.reschedule_hours * failures,
    )


def young_interval_hours(save_hours: float, mtbf_hours: float) -> float:
    """Return the interval at which :func:`full_recovery` costs least: ``sqrt(2*O_save*T_fail)``.

    Raises:
        UsageError: a time is not above 0.
    """
    require_positive({"save_hours": save_hours, "mtbf_hours": mtbf_hours})
    return math.sqrt(2 * save_hours * mtbf_hours)
