"""Hooks of optimizers whose owner was never closed.

The garbage collector may find the owner at any moment, also while an optimizer calls its hooks. To
remove one then would end its step by "OrderedDict mutated during iteration".
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

_TORCH_STEPS = register_optimizer_step_pre_hook.__code__.co_filename


class AbandonedHooks:
    """Hooks of watches that were collected as garbage, which may happen while hooks are called."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def take(self, handles: list[Any]) -> None:
        """Remove hooks that do nothing any more, at once or later."""
        self._handles += handles
        self.remove()

    def remove(self) -> None:
        """Remove them, unless an optimizer of any thread may be going through its hooks."""
        if not _is_any_thread_at(_TORCH_STEPS):
            while self._handles:
                self._handles.pop().remove()


def _is_any_thread_at(file: str) -> bool:
    """Return whether a thread is in a function of a file, or was called by one."""
    each: FrameType | None = None
    frames = list(sys._current_frames().values())
    try:
        while frames:
            each = frames.pop()
            while each is not None:
                if each.f_code.co_filename == file:
                    return True
                each = each.f_back
        return False
    finally:  # of frames that refer to this one; until a collection, they would keep all they have
        each = None
        frames.clear()


abandoned_hooks = AbandonedHooks()
