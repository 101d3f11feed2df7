"""PLS, the portion of lost samples: the share of training whose effect failures took away."""

from __future__ import annotations

from cpr_ext.errors import UsageError


def portion_of_lost_samples(samples_lost: int, total_samples: int, num_shards: int) -> float:
    """PLS of a run.

    At each failure, every lost shard loses the effect of the samples trained since its last save,
    one ``num_shards``-th of each: ``PLS += (S_now - S_last_save) / (S_total * N_emb)``
    (Maeng et al., MLSys 2021; re-derived).

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
