"""Hooks of optimizers' steps: methods that do not keep their object alive, and their order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


def hook_of(watch: Any, name: str) -> Callable[..., Any]:
    """Make a hook that calls this method of the watch for as long as the watch exists."""
    known = weakref.ref(watch)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        watch = known()
        return None if watch is None else getattr(watch, name)(optimizer, args, kwargs)

    listening: Callable[..., Any] = hook
    return listening


def identity_of(optimizer: torch.optim.Optimizer) -> int:
    """Return the same for an optimizer and a wrapper that shares its attributes (Lightning's)."""
    return id(optimizer._optimizer_step_pre_hooks)


def place_hook(hooks: Any, key: int, *, last: bool) -> None:
    """Have the hook of that key called as the last, or the first, of an optimizer's."""
    if key in hooks and next(reversed(hooks) if last else iter(hooks)) != key:
        hooks.move_to_end(key, last=last)


def with_closure(closure: Callable[[], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of step() with another closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs  # the first is the optimizer
