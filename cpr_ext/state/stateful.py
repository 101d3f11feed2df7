"""Objects with a state of their own: learning-rate schedulers, gradient scalers, data loaders.

Each has ``state_dict()`` and ``load_state_dict()``, as those of torch have. Random number
generators of a user's own are wrapped. The states are part of the dense state, in the order in
which the user gives the objects.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from cpr_ext.errors import StoreError, UsageError
from cpr_ext.state.dense_schema import pack

_EXAMPLE = "stateful=[scheduler, scaler]"


class Stateful(Protocol):
    """What can say its state and take it back."""

    def state_dict(self) -> Any:
        """Return the state: plain values and tensors."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take back what :meth:`state_dict` returned."""


class OwnGenerator:
    """A random number generator that is not the global one of its library."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state."""
        generator = self.generator
        if isinstance(generator, torch.Generator):
            return {"state": generator.get_state()}
        if isinstance(generator, random.Random):
            return {"state": generator.getstate()}
        if isinstance(generator, np.random.Generator):
            return {"state": generator.bit_generator.state}
        return {"state": generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generator's state."""
        generator, value = self.generator, state["state"]
        if isinstance(generator, random.Random):
            generator.setstate(value)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = value
        else:
            generator.set_state(value)


GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def as_list(given: Any) -> list[Any]:
    """Return a list of nothing, of one object, or of those of a sequence."""
    if given is None:
        return []
    is_one = isinstance(given, str) or not _is_sequence(given)
    return [given] if is_one else list(given)


def as_stateful(given: Any) -> list[Stateful]:
    """Return the objects that a user passes: none, one, or a sequence of them.

    Raises:
        UsageError: one has no state that can be saved and loaded, or is given twice.
    """
    items = as_list(given)
    if (twice := _twice(items)) is not None:
        raise UsageError(f"stateful[{twice}] (a {type(items[twice]).__name__}) is given twice")
    objects = [OwnGenerator(item) if isinstance(item, GENERATORS) else item for item in items]
    for index, item in enumerate(objects):
        name = f"stateful[{index}]"
        if not all(callable(getattr(item, m, None)) for m in ("state_dict", "load_state_dict")):
            raise UsageError(
                f"{name} is a {type(item).__name__} without state_dict() and load_state_dict(); "
                f"needed: objects that have both, such as {_EXAMPLE}"
            )
        pack(item.state_dict(), name)  # raises UsageError for what cannot be saved
    return objects


def refuse_saved_twice(
    objects: Sequence[Stateful], model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Raise UsageError for an object that is saved anyway, as the model, a part or an optimizer.

    Another model is saved as it is, such as an average of the weights.
    """
    modules = set(model.modules())
    for index, item in enumerate(objects):
        is_saved = any(item is optimizer for optimizer in optimizers) or (
            isinstance(item, nn.Module) and not modules.isdisjoint(item.modules())
        )
        if is_saved:
            raise UsageError(
                f"stateful[{index}] is a {type(item).__name__}; the model and the optimizers are "
                f"saved without it. stateful= is for other objects, such as {_EXAMPLE}"
            )


EXTRA_STATE = "extra_state"


@dataclass(frozen=True)
class Declared:
    """State that the user names, as no model or optimizer has it.

    Attributes:
        stateful: objects with a state.
        extra_state: returns more state, at each capture; None: there is none.
        per_rank: those of ``stateful`` that each process of a job has for itself.
        owns_extra_state: each process has its own extra state.
    """

    stateful: Sequence[Stateful] = ()
    extra_state: Callable[[], Any] | None = None
    per_rank: Sequence[Stateful] = ()
    owns_extra_state: bool = False

    @property
    def is_per_rank(self) -> bool:
        """Whether any of it is of one process alone."""
        return bool(self.per_rank) or self.owns_extra_state


def as_declared(stateful: Any, extra_state: Callable[[], Any] | None, per_rank: Any) -> Declared:
    """Return what a user declares.

    Args:
        per_rank: objects of ``stateful``, and the word "extra_state"; None: nothing.

    Raises:
        UsageError: as :func:`as_stateful`; or ``per_rank`` names something else.
    """
    objects = as_stateful(stateful)
    given, own = as_list(per_rank), []
    for index, item in enumerate(given):
        if isinstance(item, str) and item == EXTRA_STATE and extra_state is not None:
            continue
        found = [
            each for each in objects if item is each or item is getattr(each, "generator", None)
        ]
        if isinstance(item, str) or not found:
            raise UsageError(
                f"per_rank[{index}] is {item!r:.100}; needed: an object that stateful= has, or "
                '"extra_state" if extra_state= is given'
            )
        own += found
    owns_extra_state = any(isinstance(item, str) for item in given)
    return Declared(objects, extra_state, own, owns_extra_state)


def capture_stateful(objects: Sequence[Stateful]) -> list[dict[str, Any]]:
    """Return each object's type and state, as it is now."""
    return [{"type": type(item).__name__, "state": item.state_dict()} for item in objects]


def stateful_differences(saved: Sequence[Any], objects: Sequence[Stateful]) -> list[str]:
    """Return what differs between saved states and live objects, one sentence at most.

    A snapshot without any state fits all objects: it may have been made without them.
    """
    stored, live = [item["type"] for item in saved], [type(item).__name__ for item in objects]
    if stored == live or not stored:
        return []
    return [f"the store holds states of stateful={stored}, the run has {live}"]


def without_state(saved: Sequence[Any], objects: Sequence[Stateful]) -> list[str]:
    """Return the types of the objects for which a snapshot without states holds none."""
    return [] if saved else [type(item).__name__ for item in objects]


def restore_stateful(
    saved: Sequence[Any], objects: Sequence[Stateful], keep: Sequence[Stateful] = ()
) -> None:
    """Load saved states into the objects, if they are of the same types.

    Args:
        keep: objects that keep the state that they have.

    Raises:
        StoreError: an object refuses its state; those before it have theirs.
    """
    if stateful_differences(saved, objects):
        return
    for index, (item, state) in enumerate(zip(objects, saved, strict=False)):
        if any(item is each for each in keep):
            continue
        try:
            item.load_state_dict(copy.deepcopy(state["state"]))  # it may keep it
        except Exception as error:  # of the object's own code
            raise StoreError(
                f"stateful[{index}] (a {type(item).__name__}) refused the state that the store "
                f"holds of it: {error}. Make it with the settings that it was saved with"
            ) from error


def _twice(items: Sequence[Any]) -> int | None:
    """Return the index of an item that is there before; None: there is none."""
    for index, item in enumerate(items):
        if any(item is other for other in items[:index]):
            return index
    return None


def _is_sequence(given: Any) -> bool:
    return isinstance(given, Iterable) and not hasattr(given, "state_dict")
