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
        for frame in sys._current_frames().values():
            each: FrameType | None = frame
            while each is not None:
                if each.f_code.co_filename == _TORCH_STEPS:
                    return
                each = each.f_back
        while self._handles:
            self._handles.pop().remove()


abandoned_hooks = AbandonedHooks()
