"""Warnings of parameters and state that users may expect to be saved, but are not."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from cpr_ext.errors import UntrackedChangeWarning, UsageError
from cpr_ext.state.table import Table

_LARGE_BYTES = 64 << 20


def require_own_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tables: Sequence[Table]
) -> None:
    """Raise UsageError for an optimizer that updates nothing of the model, or shows copies."""
    for optimizer in optimizers:
        if optimizer.state is not optimizer.state:
            raise UsageError(
                f"a {type(optimizer).__name__} shows a copy of the state of the optimizers inside "
                "of it, into which nothing can be restored; give those"
            )
    known = {id(parameter) for parameter in model.parameters()} | {id(t.weight) for t in tables}
    if len(known) == len(tables):
        return  # a model that shows no parameters but tables
    for optimizer in optimizers:
        groups = optimizer.param_groups
        if not any(id(parameter) in known for group in groups for parameter in group["params"]):
            raise UsageError(
                f"a {type(optimizer).__name__} updates no parameter of this model; was it made for "
                "another one, or before the model's parameters were replaced?"
            )


def warn_of_large_parameters(model: nn.Module, tables: Sequence[Table]) -> None:
    """Warn of parameters that are copied whole at every snapshot although they are large."""
    for name, parameter in _others(model, tables):
        if parameter.nbytes >= _LARGE_BYTES:
            warnings.warn(
                f"parameter '{name}' ({parameter.nbytes >> 20} MB) is no table: training waits "
                "while all of it is copied, at every snapshot. If rows of it are looked up, name "
                f"it: Checkpointer(..., tables={{'{name}': parameter, ...}})",
                UntrackedChangeWarning,
                stacklevel=3,  # who makes the Checkpointer
            )


def warn_of_sparse_gradients(model: nn.Module, tables: Sequence[Table]) -> None:
    """Warn of parameters whose gradients are sparse but which are no tables."""
    for name, parameter in _others(model, tables):
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            warnings.warn(
                f"parameter '{name}' has sparse gradients but is no table: all of it is copied at "
                f"every snapshot. Name it: Checkpointer(..., tables={{'{name}': parameter, ...}})",
                UntrackedChangeWarning,
                stacklevel=3,
            )


def warn_of_loaders(objects: Mapping[str, object]) -> None:
    """Warn of data loaders that say which batch they gave, not which one was trained."""
    for name, item in objects.items():
        if isinstance(item, DataLoader):
            warnings.warn(
                f"state[{name!r}] is a {type(item).__name__}, whose position is that of the batch "
                "that it gave last. A pipeline trains that one later, so a resumed run would leave "
                "batches out; and to resume draws numbers from its generator, so later epochs may "
                "have another order. Give the loop, and state=, "
                "cpr_ext.wings.callbacks.loops.ResumableLoader(loader)",
                UntrackedChangeWarning,
                stacklevel=3,
            )


def warn_of_schedulers(
    optimizers: Sequence[torch.optim.Optimizer], objects: Iterable[object] = ()
) -> None:
    """Warn of learning-rate schedulers, whose position nothing saves.

    Args:
        objects: objects whose states are saved.
    """
    others = [item for item in objects if not isinstance(item, torch.amp.GradScaler)]
    driven = [_driven_by(item) for item in others]
    if None in driven:
        return  # an object of which we do not know what it holds
    for optimizer in optimizers:
        if any(optimizer is of_scheduler for of_scheduler in driven):
            continue
        # What every scheduler of torch leaves at the optimizer that it drives.
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            warnings.warn(
                f"a learning-rate scheduler drives {type(optimizer).__name__}, and its position is "
                "not saved: after a restart it would begin again. Save it: Checkpointer(..., "
                'state={"scheduler": scheduler})',
                UntrackedChangeWarning,
                stacklevel=3,
            )
            return


def _driven_by(item: object) -> Any:
    """Return the optimizer that a scheduler drives, also inside wrappers; None: it has none."""
    scheduler = getattr(item, "scheduler", item)
    optimizer: Any = getattr(scheduler, "optimizer", None)
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _others(model: nn.Module, tables: Sequence[Table]) -> Iterator[tuple[str, nn.Parameter]]:
    weights = {id(table.weight) for table in tables}
    for name, parameter in model.named_parameters():
        if id(parameter) not in weights:
            yield name, parameter
