"""Warnings of schedulers that step between the capture of a step and the next optimizer's step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from cpr_ext.errors import UntrackedChangeWarning


class ScheduleOrder:
    """Finds schedulers that step after ``ckpt.step()``: snapshots hold them of the step before.

    A scheduler that steps once an epoch is found when the second epoch begins. Not found is one
    that steps before the first optimizer does: it belongs to the step, or the epoch, that begins. A
    run that was resumed in the middle of an epoch shows nothing of that. In such a run a scheduler
    is found only if it steps late in the second step and in the third.

    Args:
        objects: objects whose states are saved; schedulers count in ``last_epoch``.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        found = [getattr(item, "scheduler", item) for item in objects]  # Accelerate wraps them
        self._all = [each for each in found if isinstance(getattr(each, "last_epoch", None), int)]
        self.restart(is_resumed=False)

    @property
    def has_schedulers(self) -> bool:
        """Whether there is anything to find."""
        return bool(self._all)

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
                stacklevel=4,
            )
        self._late.clear()
        self.note_captured()
