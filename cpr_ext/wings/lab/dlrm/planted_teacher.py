"""The known truth of the synthetic source: the probability of label 1 of each sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cpr_ext.wings.lab.dlrm.array_types import Float64, Int64

_BIAS = -0.8
_DENSE_STD = 0.4
_LARGE_TABLE_STD = 1.1
_SMALL_TABLE_STD = 0.25
_PAIR_STD = 0.35
_MAX_LARGE_TABLES = 4
_LARGE_TABLE_MIN_ROWS = 1_000


class PlantedTeacher:
    """Log-odds as a sum of row effects, a linear dense effect and a few pairwise products.

    The effect of a row is a hash of (seed, table, row id), so that memory does not grow with the
    tables. The largest tables weigh most, because snapshots are about their rows. Each of them also
    interacts with the next, by the product of second effects of the two rows.

    Args:
        num_embeddings: rows of each table.
        num_dense: continuous features, expected to be standard normal.
        seed: another seed, another truth.
    """

    def __init__(self, num_embeddings: Sequence[int], num_dense: int, seed: int) -> None:
        self._seed = seed
        by_size = sorted(range(len(num_embeddings)), key=lambda table: -num_embeddings[table])
        self._large = [
            table
            for table in by_size[:_MAX_LARGE_TABLES]
            if num_embeddings[table] >= _LARGE_TABLE_MIN_ROWS
        ] or by_size[:1]
        small = [table for table in by_size if table not in self._large]
        self._std = np.empty(len(num_embeddings))
        self._std[self._large] = _LARGE_TABLE_STD
        self._std[small] = _SMALL_TABLE_STD
        weights = row_effects(np.arange(num_dense), table=-1, effect=0, seed=seed)
        self._dense_weights = weights * _DENSE_STD / max(1.0, float(np.linalg.norm(weights)))

    def logits(self, dense: npt.NDArray[np.float32], row_ids: Int64) -> Float64:
        """Return log-odds of label 1.

        Args:
            dense: float32 (num_samples, num_dense).
            row_ids: int64 (num_tables, num_samples), one lookup per table and sample.

        Returns:
            float64 (num_samples,).
        """
        logits = _BIAS + dense @ self._dense_weights
        for table, std in enumerate(self._std):
            logits += std * row_effects(row_ids[table], table=table, effect=0, seed=self._seed)
        for left, right in zip(self._large, self._large[1:], strict=False):
            logits += (
                _PAIR_STD
                * row_effects(row_ids[left], table=left, effect=1, seed=self._seed)
                * row_effects(row_ids[right], table=right, effect=2, seed=self._seed)
            )
        return logits


def row_effects(row_ids: Int64, *, table: int, effect: int, seed: int) -> Float64:
    """Return a number per row, of mean 0 and variance 1: uniform(-sqrt(3), sqrt(3)).

    Args:
        row_ids: int64, any shape.
        table: the table's position; -1 for the dense features.
        effect: which of the row's independent effects.
        seed: of the teacher.

    Returns:
        float64, the shape of `row_ids`.
    """
    salt = np.array([seed, table, effect], dtype=np.int64).view(np.uint64)
    state = np.zeros(1, dtype=np.uint64)
    for word in salt:
        state = _splitmix64(state ^ word)
    hashed = _splitmix64(state + row_ids.astype(np.uint64))
    unit = (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    effects: Float64 = math.sqrt(3.0) * (2.0 * unit - 1.0)
    return effects


def _splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014).
    mixed = state + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
