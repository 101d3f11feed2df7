"""A data source that needs no file: production-like access skew, and labels with a known truth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.dlrm.access_skew import production_skew
from cpr_ext.wings.lab.dlrm.batch import Batch, check_batch_request
from cpr_ext.wings.lab.dlrm.evaluation import auc
from cpr_ext.wings.lab.dlrm.hyperparameters import Hyperparameters
from cpr_ext.wings.lab.dlrm.planted_teacher import PlantedTeacher
from cpr_ext.wings.lab.dlrm.presets import find_preset

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
    recommended = Hyperparameters(
        table_optimizer="rowwise_adagrad", table_lr=0.03, dense_lr=0.02, batch_size=128, epochs=1
    )

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
        return self._batches(_TRAIN, self.num_train_samples, batch_size, first_batch)

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """Return batches of the test samples."""
        return self._batches(_TEST, self.num_test_samples, batch_size, 0)

    def warnings(self) -> list[str]:
        """Return no warnings: there is no input that could be malformed."""
        return []

    @cached_property
    def teacher_auc(self) -> float:
        """Test AUC of the teacher's own log-odds: what no model can beat by more than chance."""
        labels, logits = [], []
        for batch in self.test_batches(_BLOCK_SAMPLES):
            row_ids = torch.stack(batch.indices).numpy()
            labels.append(batch.labels.numpy())
            logits.append(self._teacher.logits(batch.dense.numpy(), row_ids))
        return auc(np.concatenate(labels), np.concatenate(logits))

    def _batches(
        self, split: int, num_samples: int, batch_size: int, first_batch: int
    ) -> Iterator[Batch]:
        check_batch_request(batch_size, first_batch)
        return self._generate(split, num_samples, batch_size, first_batch)

    def _generate(
        self, split: int, num_samples: int, batch_size: int, first_batch: int
    ) -> Iterator[Batch]:
        one_each = torch.arange(batch_size)
        held_number = -1
        held: _Samples | None = None
        for start in range(first_batch * batch_size, num_samples, batch_size):
            stop = min(start + batch_size, num_samples)
            parts = []
            for number in range(start // _BLOCK_SAMPLES, (stop - 1) // _BLOCK_SAMPLES + 1):
                if held is None or number != held_number:
                    held_number, held = number, self._block(split, number)
                first = number * _BLOCK_SAMPLES
                parts.append(held.part(max(start - first, 0), stop - first))
            yield _as_batch(parts, one_each[: stop - start])

    def _block(self, split: int, number: int) -> _Samples:
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
        return _Samples(dense, row_ids, labels)


@dataclass
class _Samples:
    dense: npt.NDArray[np.float32]  # (num_samples, num_dense)
    row_ids: npt.NDArray[np.int64]  # (num_tables, num_samples)
    labels: npt.NDArray[np.float32]  # (num_samples,)

    def part(self, start: int, stop: int) -> _Samples:
        return _Samples(
            self.dense[start:stop], self.row_ids[:, start:stop], self.labels[start:stop]
        )


def _as_batch(parts: list[_Samples], offsets: torch.Tensor) -> Batch:
    # Concatenated even when there is one part: a batch owns its memory.
    row_ids = torch.from_numpy(np.concatenate([part.row_ids for part in parts], axis=1))
    return Batch(
        dense=torch.from_numpy(np.concatenate([part.dense for part in parts])),
        indices=list(row_ids),
        offsets=[offsets] * len(row_ids),
        labels=torch.from_numpy(np.concatenate([part.labels for part in parts])),
    )


def _affine(num_embeddings: int, table: int, seed: int) -> tuple[int, int]:
    """Return factor and shift of a permutation rank -> (factor * rank + shift) % num_embeddings.

    The factor is near the golden section of the table, which puts the hottest rows far apart.
    """
    factor = max(1, round(num_embeddings * (math.sqrt(5.0) - 1.0) / 2.0))
    while math.gcd(factor, num_embeddings) != 1:
        factor += 1
    shift = int(np.random.default_rng([seed, table]).integers(num_embeddings))
    return factor, shift
