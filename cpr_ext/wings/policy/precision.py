"""In how many bits partial snapshots keep rows: the bytes, and the rule of expected restores.

The rule is Check-N-Run's (Eisenman et al., NSDI 2022; as recalled). A rounding error enters a row
each time it is restored, so the expected number of restores determines the bits. It rounds whole
checkpoints. Here a failure restores the rows of lost shards alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy.checks import require_not_negative, require_positive
from cpr_ext.wings.policy.costs import JobSize

PrecisionName = Literal["float32", "float16", "int8"]
PRECISIONS: tuple[PrecisionName, ...] = ("float32", "float16", "int8")

ROW_ID_BYTES = 8
# Check-N-Run takes 2 bits up to 1 restore, 3 up to 3, 4 up to 20, else 8. Here 8 is the least.
# Errors of independent roundings add in square, and int8's steps are 17 times smaller than those of
# 4 bits: so many restores add as much error as 20 in 4 bits (derived).
MOST_RESTORES_INT8 = 20 * (255 / 15) ** 2


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

    A rounded row has a scale as float32, in int8 also a bias.

    Raises:
        UsageError: an unknown precision.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}; allowed: {', '.join(PRECISIONS)}")
    exact = 4 * embedding_dim
    if precision == "float32":
        return exact
    return min(exact, embedding_dim + 8 if precision == "int8" else 2 * embedding_dim + 4)


def mean_row_bytes(rows: Sequence[RowSizes], precision: str) -> float:
    """Return what a row takes in a partial snapshot: weights, exact state and id."""
    total = sum(
        each.num_rows * (weight_bytes(each.embedding_dim, precision) + each.state_bytes)
        for each in rows
    )
    return total / sum(each.num_rows for each in rows) + ROW_ID_BYTES


def bytes_share(rows: Sequence[RowSizes], precision: str) -> float:
    """Return the bytes of a row in a partial snapshot, as a share of float32's there."""
    return mean_row_bytes(rows, precision) / mean_row_bytes(rows, "float32")


def expected_restores(job: JobSize, mtbf_hours: float) -> float:
    """Return how often partial recovery restores a row in the job, on average over the rows."""
    require_positive({"mtbf_hours": mtbf_hours})
    return job.total_hours / mtbf_hours * job.shards_per_failure / job.num_shards


def precision_for_restores(restores: float) -> PrecisionName:
    """Return the fewest bits that stand this expected number of restores of a row.

    By Check-N-Run's rule, as recalled, 4 bits stand 20 restores; so 8 bits stand 5,780 (derived).
    """
    require_not_negative({"restores": restores})
    return "int8" if restores <= MOST_RESTORES_INT8 else "float16"
