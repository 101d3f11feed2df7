"""PLS, the portion of lost samples: the share of training whose effect failures took away.

The account is CPR's (Maeng et al., MLSys 2021; re-derived): at each failure, for each lost shard,
``PLS += (S_now - S_last_save) / (S_total * N_emb)``. The expectations assume that failures strike
at a constant rate while training makes progress.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy.costs import JobSize, require_positive, require_share


def portion_of_lost_samples(samples_lost: int, total_samples: int, num_shards: int) -> float:
    """Return PLS of a run.

    Args:
        samples_lost: sum over failures and lost shards of ``S_now - S_last_save``, in samples.
        total_samples: samples of the whole job, ``S_total``.
        num_shards: shards of the embedding tables, ``N_emb``.

    Returns:
        The portion, 0 without failures. It may pass 1 only if samples were lost more than once.

    Raises:
        UsageError: a negative loss, or a job without samples or shards.
    """
    if samples_lost < 0 or total_samples < 1 or num_shards < 1:
        raise UsageError(
            f"samples_lost is {samples_lost}, total_samples {total_samples}, num_shards "
            f"{num_shards}; needed: at least 0, 1 and 1"
        )
    return samples_lost / (total_samples * num_shards)


class RunningPLS:
    """PLS during a run.

    Args:
        total_samples: samples of the whole job.
        num_shards: shards of the embedding tables.

    Raises:
        UsageError: a job without samples or shards.
    """

    def __init__(self, total_samples: int, num_shards: int) -> None:
        portion_of_lost_samples(0, total_samples, num_shards)
        self.total_samples = total_samples
        self.num_shards = num_shards
        self.samples_lost = 0

    def record_failure(self, samples_since_save: Iterable[int]) -> float:
        """Take note of a failure: samples since its last save for each lost shard. Returns PLS.

        Raises:
            UsageError: more shards than there are, or a negative number of samples.
        """
        lost = list(samples_since_save)
        if len(lost) > self.num_shards or any(samples < 0 for samples in lost):
            raise UsageError(
                f"a failure lost {lost} samples; needed: at most {self.num_shards} numbers, "
                "one per lost shard, none negative"
            )
        self.samples_lost += sum(lost)
        return self.value

    @property
    def value(self) -> float:
        """PLS so far."""
        return portion_of_lost_samples(self.samples_lost, self.total_samples, self.num_shards)


def expected_pls(job: JobSize, mtbf_hours: float, interval_hours: float) -> float:
    """Return the paper's expectation, ``k*T_save/(2*T_fail*N_emb)`` for ``k`` shards per failure.

    Right for an interval that divides the job, or is short against it; :func:`exact_expected_pls`
    needs neither.

    Raises:
        UsageError: a time is not above 0.
    """
    require_positive({"mtbf_hours": mtbf_hours, "interval_hours": interval_hours})
    return job.shards_per_failure * interval_hours / (2 * mtbf_hours * job.num_shards)


def mean_hours_since_save(total_hours: float, interval_hours: float) -> float:
    """Return how long ago the last save was (or the start), at a moment drawn evenly from the job.

    ``interval_hours/2`` if the interval divides the job, ``total_hours/2`` if it is longer.
    """
    saves = whole_saves(total_hours, interval_hours)
    rest_hours = max(0.0, total_hours - saves * interval_hours)
    return (saves * interval_hours**2 + rest_hours**2) / (2 * total_hours)


def whole_saves(total_hours: float, interval_hours: float) -> int:
    """Saves of a job, one after each whole interval; one that falls on the end counts."""
    require_positive({"total_hours": total_hours, "interval_hours": interval_hours})
    return math.floor(total_hours / interval_hours * (1 + 1e-12))


def exact_expected_pls(job: JobSize, mtbf_hours: float, interval_hours: float) -> float:
    """Return the expected PLS for any interval, also one longer than the job (no save).

    Raises:
        UsageError: a time is not above 0.
    """
    require_positive({"mtbf_hours": mtbf_hours})
    since_save_hours = mean_hours_since_save(job.total_hours, interval_hours)
    return job.shards_per_failure * since_save_hours / (mtbf_hours * job.num_shards)


def interval_for_pls(job: JobSize, mtbf_hours: float, target_pls: float) -> float:
    """Return the interval at which :func:`expected_pls` is ``target_pls``, at most the whole job.

    ``T_save = 2*PLS*N_emb*T_fail/k`` hours for ``k`` shards per failure.

    Raises:
        UsageError: the target is not a share, or the MTBF not above 0.
    """
    require_positive({"mtbf_hours": mtbf_hours})
    require_share("target_pls", target_pls)
    interval_hours = 2 * target_pls * job.num_shards * mtbf_hours / job.shards_per_failure
    return min(interval_hours, job.total_hours)
