"""How to train on a data source: the settings a training command starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cpr_ext.errors import UsageError

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
