"""What a training step is given (`Batch`), what gives it (`DataSource`), and how to train on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from cpr_ext.errors import UsageError

Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


TableOptimizerName = Literal["rowwise_adagrad", "adagrad", "sgd"]


@dataclass(frozen=True)
class Hyperparameters:
    """Settings with which one source and the `tiny` model were tuned.

    Attributes:
        table_optimizer: ``rowwise_adagrad`` (one accumulator per row), ``adagrad``
            (one per element) or ``sgd`` (no state); all work on sparse gradients.
        table_lr: learning rate of the embedding tables.
        dense_lr: learning rate of the MLPs, which are trained with Adagrad.
        batch_size: samples per step.
        epochs: passes over the training samples.

    Raises:
        UsageError: an unknown optimizer, or a number that is not positive.
    """

    table_optimizer: TableOptimizerName = "rowwise_adagrad"
    table_lr: float = 0.05
    dense_lr: float = 0.01
    batch_size: int = 128
    epochs: int = 1

    def __post_init__(self) -> None:
        allowed = get_args(TableOptimizerName)
        if self.table_optimizer not in allowed:
            raise UsageError(
                f"table_optimizer is {self.table_optimizer!r}; allowed: {', '.join(allowed)}"
            )
        for name in ("table_lr", "dense_lr", "batch_size", "epochs"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be positive")


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


@runtime_checkable
class DataSource(Protocol):
    """Training and test samples of one data set.

    Batches are a pure function of the source, `epoch`, `seed` and `batch_size`. Batch b of epoch e
    is the same whatever `first_batch` is, so a restarted run resumes where it stopped.
    """

    @property
    def name(self) -> str:
        """Short name for reports."""
        ...

    @property
    def table_names(self) -> tuple[str, ...]:
        """One name per embedding table, in the order of `Batch.indices`."""
        ...

    @property
    def num_embeddings(self) -> tuple[int, ...]:
        """Rows of each table; every index is below its table's number."""
        ...

    @property
    def num_dense(self) -> int:
        """Continuous features per sample; may be 0."""
        ...

    @property
    def num_train_samples(self) -> int | None:
        """Samples of one epoch; None if only reading the stream can show it."""
        ...

    @property
    def recommended(self) -> Hyperparameters:
        """Settings with which the `tiny` model learns this source well."""
        ...

    def train_batches(
        self, batch_size: int, *, epoch: int = 0, first_batch: int = 0, seed: int = 0
    ) -> Iterator[Batch]:
        """Return batches `first_batch` and later of `epoch`; the last may be short."""
        ...

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """Return the test samples, always in the same order; the last batch may be short."""
        ...

    def warnings(self) -> list[str]:
        """Return a sentence with counts for each kind of malformed or skipped input so far."""
        ...


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
