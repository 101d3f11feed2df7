"""Values that objects carry from step to step without showing them in a ``state_dict()``."""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from cpr_ext.errors import UsageError
from cpr_ext.state.flatten import pack
from cpr_ext.state.stateful import GENERATORS, OwnGenerator

_BYTES_OF_A_NUMBER = 8
_MOST_ITEMS = 256  # of a container; of a longer one its length counts
#: Packages whose modules and optimizers show all of their state.
_OF_KNOWN = frozenset(("torch", "torchrec", "fbgemm_gpu", "torchmetrics"))
_OWN_WAYS = ("state_dict", "_save_to_state_dict", "get_extra_state")


def attributes_of(thing: nn.Module | torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Return what a module or an optimizer of the user's has that torch did not give it."""
    if type(thing).__module__.partition(".")[0] in _OF_KNOWN:
        return
    own = isinstance(thing, nn.Module) and _OWN_WAYS
    if own and any(getattr(type(thing), way) is not getattr(nn.Module, way) for way in own):
        return  # it says by itself what it carries
    for name in vars(thing).keys() - _names_of_torch():
        yield name, vars(thing)[name]


@cache
def _names_of_torch() -> frozenset[str]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    return frozenset(("step", "_step_count", "_opt_called", *vars(optimizer), *vars(nn.Module())))


def mark_of(value: Any) -> Any:
    """Return a mark of a value for :func:`is_same_mark`, which shows whether it kept still.

    None also for what carries no numbers, such as a function.
    """
    if isinstance(value, torch.Tensor):
        return None if value.grad_fn is not None else (weakref.ref(value), value._version)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, GENERATORS):
        return leaves(OwnGenerator(value).state_dict())
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple | deque):
        return (len(value), *map(mark_of, islice(value, _MOST_ITEMS)))
    return None


def is_same_mark(left: Any, right: Any) -> bool:
    """Return whether two marks are of a value that kept still."""
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(is_same_mark, left, right))
    if isinstance(left, weakref.ref):
        return left is right
    return type(left) is type(right) and bool(left == right)


def leaves(tree: Any) -> dict[Any, set[str]]:
    """Return all numbers and tensors' bits of a tree, each with the names that it stands under.

    Raises:
        UsageError: the tree has something else.
    """
    skeleton, tensors = pack(tree)
    found: dict[Any, set[str]] = {}
    for value, names in _plain(skeleton, frozenset()):
        leaf: Any = _bits(tensors[value.name]) if isinstance(value, _Packed) else json.dumps(value)
        found.setdefault(leaf, set()).update(names)
    return found


def _bits(tensor: torch.Tensor) -> tuple[torch.dtype, bytes]:
    values = tensor.detach().to("cpu").contiguous().reshape(-1)
    return tensor.dtype, values.view(torch.uint8).numpy().tobytes()


class _Packed(NamedTuple):
    """A tensor of a packed tree."""

    name: str


def _plain(skeleton: Any, names: frozenset[str]) -> Iterator[tuple[Any, frozenset[str]]]:
    if isinstance(skeleton, dict):
        for key, value in skeleton.items():
            if key in ("$tensor", "$array"):
                yield _Packed(value), names
            else:
                yield from _plain(value, names | {last_name(key)})
    elif isinstance(skeleton, list):
        for value in skeleton:
            yield from _plain(value, names)
    else:
        yield skeleton, names


def last_name(path: str) -> str:
    """Return the last name of a path such as ``tower.0._calls``, as users write it: ``calls``."""
    return path.rpartition(".")[2].lstrip("_")


def is_within(name: str, values: Sequence[Any], declared: Mapping[Any, set[str]]) -> bool:
    """Return whether all numbers and bits of ``values`` are among those of what is saved.

    A number alone may be there by chance. It counts under its own name, or next to a tensor.

    Args:
        name: of the values.
        declared: the :func:`leaves` of what is saved.
    """
    try:
        own = leaves([_savable(value) for value in values])
    except UsageError:
        return False
    return own.keys() <= declared.keys() and (
        any(map(_is_by_no_chance, own))
        or all((names | {name}) & declared[leaf] for leaf, names in own.items())
    )


def _is_by_no_chance(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf[1]) > _BYTES_OF_A_NUMBER and any(leaf[1])


def _savable(value: Any) -> Any:
    if isinstance(value, GENERATORS):
        return OwnGenerator(value).state_dict()
    return [*value] if isinstance(value, deque) else value


class PendingGradients:
    """Whether gradients waited for their optimizer's step when the last training step ended."""

    def __init__(self) -> None:
        self._applied: dict[int, _Gradient | None] = {}
        self._waiting: set[int] = set()

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has applied the gradients that are there."""
        self._applied[id(optimizer)] = _first_gradient(optimizer)

    def end_step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Note that a training step ends; later gradients are of the next one."""
        self._waiting.clear()
        for optimizer in optimizers:
            now, last = _first_gradient(optimizer), self._applied.get(id(optimizer))
            if now is not None and not (last and now[0] is last[0] and now[1] == last[1]):
                self._waiting.add(id(optimizer))

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether gradients that are not all zero waited for this optimizer."""
        return id(optimizer) in self._waiting and any(
            each._nnz() > 0 if each.layout == torch.sparse_coo else bool(each.any())
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (each := parameter.grad) is not None
        )


_Gradient = tuple[weakref.ref[torch.Tensor], int]


def _first_gradient(optimizer: torch.optim.Optimizer) -> _Gradient | None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                return weakref.ref(gradient), gradient._version
    return None
