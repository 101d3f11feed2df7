"""Hooks of optimizers' steps: methods that do not keep their object alive, and their order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

# What torch's compiler compiles frames with now; None: it does not.
_compiler: Callable[[], Any] | None = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", None
)


def hook_of(watch: Any, name: str) -> Callable[..., Any]:
    """Make a hook that calls this method of the watch for as long as the watch exists."""
    known, method = weakref.ref(watch), getattr(type(watch), name)

    def call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        watch = known()
        return None if watch is None else method(watch, optimizer, args, kwargs)

    uncompiled: Callable[..., Any] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    # Without a wrapper, which costs more than the hook. It does not reach what a function calls.
    skip = getattr(torch._dynamo, "skip", None) or getattr(torch._dynamo.decorators, "skip", None)
    if _compiler is None or skip is None:
        return uncompiled
    is_compiling = _compiler

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        chosen = call if is_compiling() is None else uncompiled
        return chosen(optimizer, args, kwargs)

    skipped: Callable[..., Any] = skip(hook)
    return skipped


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
