"""A data source that needs no file: production-like access skew, and labels with a known truth."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.dlrm.batch import (
    Batch,
    Float64,
    Hyperparameters,
    Int64,
    Samples,
    check_batch_request,
    cut,
)
from cpr_ext.wings.lab.dlrm.presets import find_preset

_STATISTICS = Path(__file__).with_name("access_locality.json")


@dataclass(frozen=True)
class AccessSkew:
    """Shares of rows and of accesses per bucket of similarly hot rows, hottest bucket first.

    Attributes:
        row_share: float64 (num_buckets,), share of a table's rows in each bucket; sums to 1.
        access_share: float64 (num_buckets,), share of the accesses they take; sums to 1.
    """

    row_share: npt.NDArray[np.float64]
    access_share: npt.NDArray[np.float64]

    def ranks(self, uniform: npt.NDArray[np.float64], num_embeddings: int) -> npt.NDArray[np.int64]:
        """Return row ranks, 0 the hottest, for numbers drawn uniformly from [0, 1).

        A number picks its bucket by access share. Its remainder picks a row of the bucket; all rows
        of a bucket are equally likely. A pure function of `uniform`, which it keeps
        sorted: smaller numbers give hotter rows.

        Returns:
            int64, the shape of `uniform`, each in [0, num_embeddings).
        """
        access_edge = np.concatenate(([0.0], np.cumsum(self.access_share)))
        row_edge = np.concatenate(([0.0], np.cumsum(self.row_share)))
        position = np.interp(uniform, access_edge, row_edge)
        return np.minimum((position * num_embeddings).astype(np.int64), num_embeddings - 1)


def production_skew() -> AccessSkew:
    """Return the skew measured over all tables of a production model of Meta, in 2022.

    From the published statistics of facebookresearch/dlrm_datasets (access_locality.json, which
    names its source and licence). Row shares are published with three digits. Where that rounds to
    0, the share is restored as accesses / mean accesses per row. That mean is the geometric mean of
    the bucket's bounds. Rows that a batch never accessed are not in the statistics, so the shares
    are of the rows in use.
    """
    statistics = json.loads(_STATISTICS.read_text(encoding="utf-8"))
    figures = statistics["years"]["2022"]
    accesses_per_row = figures["accesses"] / figures["distinct_rows"]
    row_shares = []
    lower = 0.5
    for upper, row_share, access_share in zip(
        statistics["bucket_upper"], figures["row_share"], figures["access_share"], strict=True
    ):
        typical = math.sqrt(lower * (upper if upper is not None else 4 * lower))
        row_shares.append(row_share or access_share * accesses_per_row / typical)
        lower = upper
    row_array = np.array(row_shares[::-1])
    access_array = np.array(figures["access_share"][::-1])
    return AccessSkew(row_array / row_array.sum(), access_array / access_array.sum())


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


# Samples are drawn in blocks of this many, each from its own Philox counter range, so that the
# data set does not depend on the batch size and any batch can be made without those before it.
_BLOCK_SAMPLES = 4096
_TRAIN, _TEST = 0, 1


class Synthetic:
    """Samples with one lookup per table, skewed as in production, and labels of a planted teacher.

    Rows are drawn with the skew of `production_skew`, and hot rows are spread over each table.
    Dense features are standard normal. The label is 1 with the teacher's probability. The samples
    of all epochs are the same, in the same order: they are independent, so shuffling adds nothing.

    Args:
        size: the name of a preset, or the rows of each table.
        num_samples: training samples; there are a tenth as many for testing on top.
        num_dense: continuous features.
        seed: another seed, another data set and another truth.

    Raises:
        UsageError: an unknown preset, or a size that is not positive.
    """

    name = "synthetic"
    # With the `tiny` preset: test AUC about 0.80, where the teacher has 0.87.
    recommended = Hyperparameters(table_lr=0.03, dense_lr=0.02, batch_size=128, epochs=1)

    def __init__(
        self,
        size: str | Sequence[int] = "tiny",
        num_samples: int = 200_000,
        seed: int = 0,
        *,
        num_dense: int = 8,
    ) -> None:
        if isinstance(size, str):
            size = find_preset(size).synthetic_num_embeddings
        if not size or min(size) < 1 or num_samples < 10 or num_dense < 0:
            raise UsageError(
                f"num_embeddings {tuple(size)} must be positive, num_samples {num_samples} at "
                f"least 10, num_dense {num_dense} 0 or more"
            )
        if not 0 <= seed < 2**63:
            raise UsageError(f"seed is {seed}; it must be 0 or more and below 2**63")
        self.num_embeddings = tuple(size)
        self.table_names = tuple(f"table_{table}" for table in range(len(size)))
        self.num_dense = num_dense
        self.num_train_samples = num_samples
        self.num_test_samples = num_samples // 10
        self._seed = seed
        self._skew = production_skew()
        self._spread = [_affine(rows, table, seed) for table, rows in enumerate(size)]
        self._teacher = PlantedTeacher(size, num_dense, seed)

    def train_batches(
        self, batch_size: int, *, epoch: int = 0, first_batch: int = 0, seed: int = 0
    ) -> Iterator[Batch]:
        """Return batches of the training samples; `epoch` and `seed` change nothing."""
        check_batch_request(batch_size, first_batch)
        begin = first_batch * batch_size
        return cut(self._samples(_TRAIN, self.num_train_samples, begin), batch_size)

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """Return batches of the test samples."""
        return cut(self._samples(_TEST, self.num_test_samples, 0), batch_size)

    def _samples(self, split: int, num_samples: int, begin: int) -> Iterator[Samples]:
        """Yield samples from the block of sample ``begin`` on."""
        first = begin // _BLOCK_SAMPLES * _BLOCK_SAMPLES
        for start in range(first, num_samples, _BLOCK_SAMPLES):
            block = self._block(split, start // _BLOCK_SAMPLES)
            yield block.part(slice(max(0, begin - start), num_samples - start))

    def _block(self, split: int, number: int) -> Samples:
        bits = np.random.Philox(key=[self._seed, split], counter=[0, 0, 0, number])
        generator = np.random.Generator(bits)
        uniform = generator.random((len(self.num_embeddings), _BLOCK_SAMPLES))
        dense = generator.standard_normal((_BLOCK_SAMPLES, self.num_dense), dtype=np.float32)
        row_ids = np.empty(uniform.shape, dtype=np.int64)
        for table, (rows, (factor, shift)) in enumerate(
            zip(self.num_embeddings, self._spread, strict=True)
        ):
            row_ids[table] = (factor * self._skew.ranks(uniform[table], rows) + shift) % rows
        probability = 1.0 / (1.0 + np.exp(-self._teacher.logits(dense, row_ids)))
        labels = (generator.random(_BLOCK_SAMPLES) < probability).astype(np.float32)
        return Samples(dense, row_ids, labels)


def _affine(num_embeddings: int, table: int, seed: int) -> tuple[int, int]:
    """Return factor and shift of a permutation rank -> (factor * rank + shift) % num_embeddings.

    The factor is near the golden section of the table, which puts the hottest rows far apart.
    """
    factor = max(1, round(num_embeddings * (math.sqrt(5.0) - 1.0) / 2.0))
    while math.gcd(factor, num_embeddings) != 1:
        factor += 1
    shift = int(np.random.default_rng([seed, table]).integers(num_embeddings))
    return factor, shift
