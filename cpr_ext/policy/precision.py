"""In how many bits partial snapshots keep rows: the bytes, and the rule of expected restores.

The rule is Check-N-Run's (Eisenman et al., NSDI 2022; as recalled). A rounding error enters a row
each time it is restored, so the expected number of restores determines the bits. It rounds whole
checkpoints. Here a failure restores the rows of lost shards alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cpr_ext.errors import UsageError
from cpr_ext.policy.checks import require_not_negative, require_positive, require_share
from cpr_ext.policy.costs import JobSize

PrecisionName = Literal["float32", "float16", "bfloat16", "int8", "int4"]
PRECISIONS: tuple[PrecisionName, ...] = ("float32", "float16", "bfloat16", "int8", "int4")

# Check-N-Run takes 2 bits up to 1 restore, 3 up to 3, 4 up to 20, else 8. Here 4 is the least.
MOST_RESTORES_INT4 = 20.0
# Errors of independent roundings add in square: int8's steps are 17 times smaller (derived).
MOST_RESTORES_INT8 = MOST_RESTORES_INT4 * (255 / 15) ** 2


@dataclass(frozen=True)
class RowSizes:
    """Rows of one size, in memory.

    Attributes:
        num_rows: how many; in proportion to others.
        embedding_dim: float32 weights of a row; 0: it has other weights, counted as state.
        state_bytes: optimizer state of a row, which snapshots keep exactly; row-wise Adagrad has 4.
    """

    num_rows: float
    embedding_dim: int
    state_bytes: float = 4.0

    def __post_init__(self) -> None:
        require_positive({"num_rows": self.num_rows})
        require_not_negative({"embedding_dim": self.embedding_dim, "state_bytes": self.state_bytes})


def weight_bytes(embedding_dim: int, precision: str) -> int:
    """Return the bytes of a row's weights in a snapshot; float32's where rounding saves none.

    int8 has scale and bias as float32, int4 as float16.

    Raises:
        UsageError: an unknown precision.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}; allowed: {', '.join(PRECISIONS)}")
    exact = 4 * embedding_dim
    if precision == "int8":
        return min(exact, embedding_dim + 8)
    if precision == "int4":
        return min(exact, (embedding_dim + 1) // 2 + 4)
    return exact if precision == "float32" else 2 * embedding_dim


def id_bytes(precision: str, fraction: float) -> float:
    """Return the most that an id takes where a partial snapshot has this share of the rows.

    Ids of rounded rows are packed by the code of Elias and Fano: 2 bits, and the logarithm of the
    mean distance of two ids.
    """
    require_share("fraction", fraction)
    return 8.0 if precision == "float32" else (2 - math.log2(fraction)) / 8


def mean_row_bytes(rows: Sequence[RowSizes], precision: str, fraction: float) -> float:
    """Return what a row takes in a partial snapshot: weights, exact state and id.

    Without the few rows that break the bound of their precision and stay float32.
    """
    total = sum(
        each.num_rows * (weight_bytes(each.embedding_dim, precision) + each.state_bytes)
        for each in rows
    )
    return total / sum(each.num_rows for each in rows) + id_bytes(precision, fraction)


def bytes_share(rows: Sequence[RowSizes], precision: str, fraction: float) -> float:
    """Return the bytes of a row in a partial snapshot, as a share of float32's there."""
    exact = mean_row_bytes(rows, "float32", fraction)
    return mean_row_bytes(rows, precision, fraction) / exact


def expected_restores(job: JobSize, mtbf_hours: float) -> float:
    """Return how often partial recovery restores a row in the job, on average over the rows."""
    require_positive({"mtbf_hours": mtbf_hours})
    return job.total_hours / mtbf_hours * job.shards_per_failure / job.num_shards


def precision_for_restores(restores: float) -> PrecisionName:
    """Return the fewest bits that stand this expected number of restores of a row.

    Check-N-Run's rule, as recalled: 4 bits up to 20 restores, 8 bits above. Its 2 and 3 bits are
    not offered here. Above 5,780 restores int8 adds as much error as int4 at 20 (derived): float16.
    """
    require_not_negative({"restores": restores})
    if restores <= MOST_RESTORES_INT4:
        return "int4"
    return "int8" if restores <= MOST_RESTORES_INT8 else "float16"
