"""Checks of what users pass to a ``Checkpointer``: each error names value and remedy."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from cpr_ext.errors import UsageError

_MOST = 2**62
_MOST_SHARDS = 4096


def require_one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    """Raise UsageError unless ``value`` is one of ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(f"{option} is {value!r:.100}; allowed: {', '.join(allowed)}")


def as_number(option: str, value: Any) -> float:
    """Return ``value`` as a float: any real number, such as ``np.float32`` or a tensor of one.

    NaN is one; it fails every comparison.

    Raises:
        UsageError: it is none.
    """
    try:
        if isinstance(value, str | bytes | bool):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(f"{option} is {value!r:.100}; needed: a number") from None
    return number


def require_positive_or_none(option: str, value: Any) -> None:
    """Raise UsageError unless ``value`` is None or a number above zero."""
    if value is not None and not as_number(option, value) > 0:
        raise UsageError(f"{option} is {value}; it must be positive, or None")


def require_flag(option: str, value: object) -> None:
    """Raise UsageError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise UsageError(f"{option} is {value!r:.100}; allowed: True, False")


def require_kind(option: str, value: object, kind: type, example: str) -> None:
    """Raise UsageError unless ``value`` is None or of the class ``kind``."""
    if value is not None:
        require_instance(option, value, kind, example)


def require_instance(option: str, value: object, kind: type, example: str) -> None:
    """Raise UsageError unless ``value`` is of the class ``kind``."""
    if not isinstance(value, kind):
        raise UsageError(f"{option} is {value!r:.100}; needed: such as {example}")


def as_whole_number(option: str, value: Any, least: int, otherwise: str = "") -> int:
    """Return ``value`` as an int: any integer-like number, such as ``np.int64`` or a tensor of one.

    Raises:
        UsageError: it is none, or less than ``least``; ``otherwise`` ends the message.
    """
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError, ValueError):
        if not isinstance(value, float) or not value.is_integer():
            raise UsageError(f"{option} is {value!r:.100}; needed: a whole number") from None
        number = int(value)
    if number > _MOST:
        raise UsageError(f"{option} is {number}; it must be at most {_MOST}")
    if number < least:
        meaning = "must not be negative" if least == 0 else f"must be at least {least}"
        raise UsageError(f"{option} is {number}; it {meaning}{otherwise}")
    return number


def as_shard_count(value: Any) -> int:
    """Return a number of shards; each is a directory that stays open.

    Raises:
        UsageError: it is none, or out of range.
    """
    number = as_whole_number("num_shards", value, 1)
    if number > _MOST_SHARDS:
        raise UsageError(f"num_shards is {number}; it must be at most {_MOST_SHARDS}")
    return number


def require_model(model: object) -> None:
    """Raise UsageError unless ``model`` is a module."""
    if isinstance(model, torch.optim.Optimizer):
        raise UsageError("model is an optimizer; the model comes first, then its optimizers")
    require_some("model", model, torch.nn.Module, "a torch.nn.Module")


def require_path(option: str, value: object) -> None:
    """Raise UsageError unless ``value`` names a file or directory."""
    require_some(option, value, (str, os.PathLike), "a path")
    if value == "":
        raise UsageError(f"{option} is ''; needed: a path ('.' is the working directory)")


def require_some(option: str, value: object, kind: type | tuple[type, ...], needed: str) -> None:
    """Raise UsageError unless ``value`` is of a class ``kind``."""
    if not isinstance(value, kind):
        raise UsageError(f"{option} is {value!r:.100}; needed: {needed}")


def as_optimizers(given: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that a user passes: one, or a sequence of them.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(given, torch.optim.Optimizer):
        return [_unwrapped(given)]
    if isinstance(given, Iterable) and not isinstance(given, str | bytes):
        optimizers = list(given)
        if all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
            return [_unwrapped(optimizer) for optimizer in optimizers]
        given = next(o for o in optimizers if not isinstance(o, torch.optim.Optimizer))
    raise UsageError(
        f"optimizers is or holds a {type(given).__name__}; needed: the torch optimizer of the "
        "model, or a list of all of them. The store's directory comes after it. To load a model "
        "for evaluation without them: cpr_ext.load_into(model, directory)"
    )


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that steps, inside wrappers that only look like one (Accelerate's)."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            raise UsageError(
                f"a {type(optimizer).__name__} cannot be watched, as it takes no step hooks; give "
                "the torch optimizer inside of it"
            )
        own = getattr(optimizer, "state", None)
        if own is not None and own is not getattr(inner, "state", None):
            kind, of_inner = type(optimizer).__name__, type(inner).__name__
            raise UsageError(
                f"a {kind} has state of its own and takes no step hooks, so its state would not "
                f"be saved; give the {of_inner} inside of it, and the {kind} itself to state=: "
                f"Checkpointer(model, {kind.lower()}.optimizer, ..., "
                f"state={{'{kind.lower()}': {kind.lower()}}})"
            )
        optimizer = inner
    return optimizer


def as_shards(shards: Any, num_shards: int) -> list[int]:
    """Return numbers of lost shards, ascending, each once.

    Raises:
        UsageError: it is no sequence of them, or there is no such shard.
    """
    if isinstance(shards, str) or not isinstance(shards, Iterable):
        raise UsageError(f"shards is {shards!r}; needed: a list of shards, such as [1]")
    numbers = sorted({as_whole_number("shards", shard, -(2**63)) for shard in shards})
    for shard in numbers:
        if not 0 <= shard < num_shards:
            raise UsageError(f"shard {shard} does not exist; there are 0 to {num_shards - 1}")
    return numbers
