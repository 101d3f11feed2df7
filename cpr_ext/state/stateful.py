"""State that no model or optimizer has, by name: ``Checkpointer(state={...})``.

Objects have ``state_dict()`` and ``load_state_dict()``: learning-rate schedulers, gradient scalers,
readers. Random number generators of a user's own are wrapped. A callable gives plain values and
tensors, which the report of a recovery has.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from cpr_ext.errors import StoreError, UsageError
from cpr_ext.state.dense_schema import pack

_EXAMPLE = 'state={"scheduler": scheduler, "scaler": scaler}'


class Stateful(Protocol):
    """What can say its state and take it back."""

    def state_dict(self) -> Any:
        """Return the state: plain values and tensors."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take back what :meth:`state_dict` returned."""


@dataclass(frozen=True)
class PerRank:
    """Marks state that each process of a job has for itself, such as the reader of its own files.

    All other state is that of the process that saved last.

    Attributes:
        item: an object or a callable of ``state=``.
    """

    item: Any


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


@dataclass(frozen=True)
class Declared:
    """State that the user names, as no model or optimizer has it.

    Attributes:
        objects: those that load their state themselves.
        values: callables whose results are saved, at each capture.
        own: the names of what each process of a job has for itself.
    """

    objects: Mapping[str, Stateful] = field(default_factory=dict)
    values: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    own: frozenset[str] = frozenset()

    def own_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of ``values`` that each process has for itself."""
        return {name: value for name, value in values.items() if name in self.own}

    def shared_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of ``values`` that all processes have in common."""
        return {name: value for name, value in values.items() if name not in self.own}


def as_declared(state: Any) -> Declared:
    """Return what a user declares with ``state=``; None: nothing.

    Raises:
        UsageError: it is no mapping from names, names an object twice, or names something that has
            no state which can be saved.
    """
    given = joined_state(state, {})
    objects: dict[str, Stateful] = {}
    values: dict[str, Callable[[], Any]] = {}
    known: dict[int, str] = {}
    for name, marked in given.items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"state= has the name {name!r:.100}; needed: text, such as {_EXAMPLE}")
        item = marked.item if isinstance(marked, PerRank) else marked
        what = f"state[{name!r}]"
        if (other := known.setdefault(id(item), name)) != name:
            raise UsageError(
                f"{what} and state[{other!r}] are the same {type(item).__name__}; name it once"
            )
        if isinstance(item, GENERATORS):
            item = OwnGenerator(item)
        if all(callable(getattr(item, m, None)) for m in ("state_dict", "load_state_dict")):
            pack(item.state_dict(), what)  # raises UsageError for what cannot be saved
            objects[name] = item
        elif callable(item):
            values[name] = item
        else:
            raise UsageError(
                f"{what} is a {type(item).__name__} without state_dict() and load_state_dict(); "
                f"needed: objects that have both, such as {_EXAMPLE}, or a callable without "
                f"arguments that returns plain values and tensors: {{{name!r}: lambda: ...}}. "
                "Around a data loader: cpr_ext.wings.callbacks.loops.ResumableLoader(loader)"
            )
    own = frozenset(name for name, item in given.items() if isinstance(item, PerRank))
    return Declared(objects, values, own)


def joined_state(given: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's ``state=`` with what an integration adds to it, but for None.

    Raises:
        UsageError: the user's is no mapping, or has a name that the integration needs.
    """
    if given is not None and not isinstance(given, Mapping):
        raise UsageError(f"state is a {type(given).__name__}; needed: names, such as {_EXAMPLE}")
    given, more = dict(given or {}), {n: each for n, each in more.items() if each is not None}
    if twice := given.keys() & more.keys():
        raise UsageError(f"state= has {sorted(twice)}, which is saved anyway; choose another name")
    return {**given, **more}


def refuse_saved_twice(
    objects: Mapping[str, Stateful], model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Raise UsageError for an object that is saved anyway, as the model, a part or an optimizer.

    Another model is saved as it is, such as an average of the weights.
    """
    modules = set(model.modules())
    for name, item in objects.items():
        is_saved = any(item is optimizer for optimizer in optimizers) or (
            isinstance(item, nn.Module) and not modules.isdisjoint(item.modules())
        )
        if is_saved:
            raise UsageError(
                f"state[{name!r}] is a {type(item).__name__}; the model and the optimizers are "
                f"saved without it. state= is for other objects, such as {_EXAMPLE}"
            )


def capture_state(objects: Mapping[str, Stateful]) -> dict[str, dict[str, Any]]:
    """Return each object's type and state, as it is now."""
    return {
        name: {"type": type(item).__name__, "state": item.state_dict()}
        for name, item in objects.items()
    }


def state_differences(saved: Mapping[str, Any], objects: Mapping[str, Stateful]) -> list[str]:
    """Return what differs between saved states and live objects, one sentence at most.

    A snapshot without any state fits all objects: it may have been made without them.
    """
    stored = {name: each["type"] for name, each in saved.items()}
    live = {name: type(item).__name__ for name, item in objects.items()}
    if stored == live or not stored:
        return []
    return [f"the store holds the state of {stored}, the run has state={live}"]


def restore_state(
    saved: Mapping[str, Any], objects: Mapping[str, Stateful], keep: Collection[str] = ()
) -> None:
    """Load saved states into the objects of the same names and types.

    Args:
        keep: names of objects that keep the state that they have.

    Raises:
        StoreError: an object refuses its state; those before it have theirs.
    """
    for name, item in objects.items():
        if name in keep or name not in saved or saved[name]["type"] != type(item).__name__:
            continue
        try:
            item.load_state_dict(copy.deepcopy(saved[name]["state"]))  # it may keep it
        except Exception as error:  # of the object's own code
            raise StoreError(
                f"state[{name!r}] (a {type(item).__name__}) refused the state that the store "
                f"holds of it: {error}. Make it with the settings that it was saved with"
            ) from error
