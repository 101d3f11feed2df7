"""Warnings of parameters and state that users may expect to be saved, but are not."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from cpr_ext.errors import UntrackedChangeWarning, UsageError
from cpr_ext.state.table import Table
from cpr_ext.tracking.table_events import TableEvents

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


class ScheduleOrder:
    """Finds schedulers that step after ``ckpt.step()``: snapshots hold them of the step before.

    A scheduler that steps once an epoch is found when the second epoch begins. Not found is one
    that steps before the first optimizer does: it belongs to the step, or the epoch, that begins. A
    run that was resumed in the middle of an epoch shows nothing of that. In such a run a scheduler
    is found only if it steps late in the second step and in the third.

    Args:
        events: report when an optimizer begins to step.
        objects: objects whose states are saved; schedulers count in ``last_epoch``.
    """

    def __init__(self, events: TableEvents, objects: Iterable[object]) -> None:
        found = [getattr(item, "scheduler", item) for item in objects]  # Accelerate wraps them
        self._all = [each for each in found if isinstance(getattr(each, "last_epoch", None), int)]
        if self._all:
            events.first_stepped.append(self.note_optimizer)
        self.restart(is_resumed=False)

    def restart(self, *, is_resumed: bool) -> None:
        """Begin again, after the construction or a recovery."""
        self._is_resumed = is_resumed
        self._num_steps = 0  # of optimizers
        self._watched: list[Any] = list(self._all)
        self._late: list[Any] = []
        self.note_captured()

    def note_captured(self) -> None:
        """Note that a snapshot of now would hold the schedulers' positions of now."""
        self._captured = [scheduler.last_epoch for scheduler in self._watched]

    def note_optimizer(self) -> None:
        """Note that the first optimizer of a step begins its step."""
        self._num_steps += 1
        kept = []
        for scheduler, captured in zip(self._watched, self._captured, strict=True):
            is_late = scheduler.last_epoch != captured
            if self._num_steps == 1 or (self._is_resumed and self._num_steps == 2):
                is_kept = is_late == (self._num_steps == 2)
            elif is_late:
                self._late.append(scheduler)
                is_kept = False
            else:
                is_kept = not self._is_resumed
            if is_kept:
                kept.append(scheduler)
        if len(kept) < len(self._watched):
            self._watched = kept
            self.note_captured()

    def note_step(self, step: int) -> None:
        """Warn, as ``ckpt.step()`` ends this step, of schedulers that stepped late before it."""
        for scheduler in self._late:
            warnings.warn(
                f"{type(scheduler).__name__}.step() was called after ckpt.step() of step "
                f"{step - 1}, so a snapshot of that step holds the schedule before it. Call "
                "ckpt.step() last; a scheduler that steps once an epoch steps before the "
                "ckpt.step() of its last batch",
                UntrackedChangeWarning,
                stacklevel=5,
            )
        self._late.clear()
        self.note_captured()
