"""What a training step is given (`Batch`), what gives it (`DataSource`), and how to train on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from cpr_ext.errors import UsageError

Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Hyperparameters:
    """Settings with which one source and the `tiny` model were tuned.

    Attributes:
        table_lr: learning rate of the embedding tables, which are trained with row-wise Adagrad.
        dense_lr: learning rate of the MLPs, which are trained with Adagrad.
        batch_size: samples per step.
        epochs: passes over the training samples.

    Raises:
        UsageError: a number that is not positive.
    """

    table_lr: float = 0.05
    dense_lr: float = 0.01
    batch_size: int = 128
    epochs: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(f"{name} is {value!r}; it must be positive")


@dataclass
class Batch:
    """The samples of one step.

    Attributes:
        dense: float32 (batch_size, num_dense), the continuous features.
        indices: one tensor per table, int64 (num_lookups_t,), row ids.
        offsets: one tensor per table, int64 (batch_size,). Sample b of table t looks up
            ``indices[t][offsets[t][b] : offsets[t][b + 1]]``; the last sample's bag runs to the
            end (`torch.nn.EmbeddingBag` without ``include_last_offset``). Bags may be empty.
        labels: float32 (batch_size,), 0 or 1.
    """

    dense: torch.Tensor
    indices: list[torch.Tensor]
    offsets: list[torch.Tensor]
    labels: torch.Tensor

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return int(self.labels.shape[0])

    def to(self, device: torch.device | str) -> Batch:
        """Return the same batch on `device`; tensors already there are shared, not copied."""
        return Batch(
            dense=self.dense.to(device),
            indices=[table.to(device) for table in self.indices],
            offsets=[table.to(device) for table in self.offsets],
            labels=self.labels.to(device),
        )


@dataclass
class Samples:
    """Samples with one lookup per table.

    Attributes:
        dense: float32 (num_samples, num_dense).
        row_ids: int64 (num_tables, num_samples).
        labels: float32 (num_samples,).
    """

    dense: npt.NDArray[np.float32]
    row_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, chosen: slice | Bool) -> Samples:
        """Return some of the samples; those of a slice share memory."""
        return Samples(self.dense[chosen], self.row_ids[:, chosen], self.labels[chosen])

    @staticmethod
    def joined(parts: list[Samples]) -> Samples:
        """Return the samples of all parts, one after another."""
        return Samples(
            np.concatenate([part.dense for part in parts]),
            np.concatenate([part.row_ids for part in parts], axis=1),
            np.concatenate([part.labels for part in parts]),
        )

    def to_batch(self) -> Batch:
        """Return all of them as the samples of a step, sharing memory."""
        return Batch(
            dense=torch.from_numpy(self.dense),
            indices=list(torch.from_numpy(self.row_ids)),
            offsets=[torch.arange(len(self))] * len(self.row_ids),
            labels=torch.from_numpy(self.labels),
        )


def cut(blocks: Iterator[Samples], batch_size: int, first_batch: int = 0) -> Iterator[Batch]:
    """Return batches `first_batch` and later of a stream of samples; the last may be short.

    Raises:
        UsageError: at the call; see :func:`check_batch_request`.
    """
    check_batch_request(batch_size, first_batch)
    return _cut(blocks, batch_size, first_batch * batch_size)


def _cut(blocks: Iterator[Samples], batch_size: int, skip: int) -> Iterator[Batch]:
    held: list[Samples] = []
    for block in blocks:
        held.append(block.part(slice(skip, None)))
        skip = max(0, skip - len(block))
        if (count := sum(map(len, held))) >= batch_size:
            joined = Samples.joined(held)  # batches are of this copy
            end = count // batch_size * batch_size
            for start in range(0, end, batch_size):
                yield joined.part(slice(start, start + batch_size)).to_batch()
            held = [joined.part(slice(end, None))]
    if any(map(len, held)):
        yield Samples.joined(held).to_batch()


class DataSource(Protocol):
    """Training and test samples of one data set.

    Batches are a pure function of the source, `epoch`, `seed` and `batch_size`. Batch b of epoch e
    is the same whatever `first_batch` is, so a restarted run resumes where it stopped.
    """

    @property
    def name(self) -> str:
        """Short name for reports."""

    @property
    def table_names(self) -> tuple[str, ...]:
        """One name per embedding table, in the order of `Batch.indices`."""

    @property
    def num_embeddings(self) -> tuple[int, ...]:
        """Rows of each table; every index is below its table's number."""

    @property
    def num_dense(self) -> int:
        """Continuous features per sample; may be 0."""

    @property
    def num_train_samples(self) -> int | None:
        """Samples of one epoch; None if only reading the stream can show it."""

    @property
    def recommended(self) -> Hyperparameters:
        """Settings with which the `tiny` model learns this source well."""

    def train_batches(
        self, batch_size: int, *, epoch: int = 0, first_batch: int = 0, seed: int = 0
    ) -> Iterator[Batch]:
        """Return batches `first_batch` and later of `epoch`; the last may be short."""

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """Return the test samples, always in the same order; the last batch may be short."""


def check_batch_request(batch_size: int, first_batch: int) -> None:
    """Refuse at the call what would otherwise fail at the first batch.

    Raises:
        UsageError: `batch_size` is below 1 or `first_batch` below 0.
    """
    if batch_size < 1 or first_batch < 0:
        raise UsageError(
            f"batch_size is {batch_size} and must be 1 or more; "
            f"first_batch is {first_batch} and must be 0 or more"
        )
