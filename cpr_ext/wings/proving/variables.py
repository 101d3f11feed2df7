"""The variables of a user's loop, found from the frame that trains: what no Checkpointer knows."""

from __future__ import annotations

import itertools
import random
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from cpr_ext.wings.proving.fingerprint import Print, print_of

#: Marks values that must be as before: all but plain values, which may be of no matter.
STATE = "state "
PLAIN = "plain "
#: Is among them if there were too many to look at all.
INCOMPLETE = "plain and others"
#: Is among them: how many gradients of the model are there before the step makes its own.
GRADIENTS = "plain number of gradients left from the step before"

_START = str(Path(__file__).with_name("life.py"))  # what called the user's program
_OWN = Path(__file__).resolve().parents[2]
_FOREIGN = tuple(
    str(Path(path).resolve())
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_path(name))
)
_LIBRARIES = {"site-packages", "dist-packages"}
_MOST_VALUES = 20_000
_DEPTH = 6
_LONG = 32  # a list of more plain values is one value
_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_OF_OPTIMIZERS = ("state", "param_groups", "defaults")
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_STATES = (torch.Tensor, np.ndarray, *_GENERATORS)
_PASSED_OVER = (ModuleType, type, FunctionType, MethodType, FrameType, Path)


def variables_of(frame: FrameType | None, known: set[int]) -> dict[str, Print]:
    """Return what a frame of the user's, and those that called it, can reach.

    Args:
        frame: where training is.
        known: ids of objects that are compared in other ways.
    """
    walk = _Walk(known)
    found: dict[str, Print] = {}
    seen_modules: set[int] = set()
    while frame is not None and frame.f_code.co_filename != _START:
        if _is_users(frame.f_code.co_filename):
            is_module = frame.f_code.co_name == "<module>"
            where = "" if is_module else f"{frame.f_code.co_name}: "
            for scope, prefix in ((frame.f_locals, where), (frame.f_globals, "")):
                if prefix == "" and id(frame.f_globals) in seen_modules:
                    continue
                if prefix == "":
                    seen_modules.add(id(frame.f_globals))
                for name, value in list(scope.items()):
                    if not name.startswith("__"):
                        for path, print_ in walk.values(name, value, prefix, 0):
                            found.setdefault(path, print_)
        frame = frame.f_back
    return found


def _is_users(file: str) -> bool:
    """Return whether a source file is the user's own, not a library's."""
    if file.startswith("<"):
        return file == "<string>"
    path = Path(file).resolve()
    is_library = str(path).startswith(_FOREIGN) or _LIBRARIES.intersection(path.parts)
    return not is_library and _OWN not in path.parents


class _Walk:
    def __init__(self, known: set[int]) -> None:
        self._known = known
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # made here: another object must not get its id
        self._left = _MOST_VALUES
        self._kinds: dict[type, bool] = {}

    def values(
        self, path: str, value: Any, where: str, depth: int, *, owner: str = ""
    ) -> Iterator[tuple[str, Print]]:
        """Yield the values under a variable, with the mark of their kind, where and path."""
        self._left -= 1
        if self._left == 0:
            yield INCOMPLETE, Print("")
        if self._left <= 0 or depth > _DEPTH or isinstance(value, _PASSED_OVER):
            return
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
            return  # a result within a step
        if not isinstance(value, _SIMPLE) and id(value) in self._known:
            return
        if (print_ := print_of(value)) is not None:
            is_state = bool(owner) or isinstance(value, _STATES)
            name = f"{STATE if is_state else PLAIN}{where}{path}"
            yield name, replace(print_, owner=owner or f"value {path}")
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if depth == 0:  # that the variable is there, also if nothing is in it
            yield f"{PLAIN}{where}{path}", Print(type(value).__name__)
        for name, item, kind in self._items(path, value):
            of = owner or (f"{kind} {path}" if kind else "")
            yield from self.values(name, item, where, depth + 1, owner=of)

    def _items(self, path: str, value: Any) -> Iterator[tuple[str, Any, str]]:
        """Yield (path, value, kind of the object if it is state that the object declares)."""
        if type(value).__module__.split(".")[0] == "cpr_ext":
            if hasattr(value, "others"):  # what a user's build() returned
                yield f"{path}.others", value.others, ""
            return
        if isinstance(value, dict):
            yield from ((f"{path}[{_key(key)}]", item, "") for key, item in list(value.items()))
        elif isinstance(value, set | frozenset):
            yield path, ", ".join(sorted(map(repr, value))), ""
        elif isinstance(value, list | tuple):
            if len(value) > _LONG and all(isinstance(v, _SIMPLE) for v in value):
                yield path, repr(value), ""
                return
            yield from ((f"{path}[{i}]", item, "") for i, item in enumerate(list(value)))
        elif isinstance(value, itertools.count):
            yield f"{path}", repr(value), ""
        elif isinstance(value, GeneratorType):
            for name, item in (value.gi_frame.f_locals if value.gi_frame else {}).items():
                yield f"{path} ({value.__name__}).{name}", item, ""
        elif isinstance(value, nn.Module):
            for name, item in (*value.named_parameters(), *value.named_buffers()):
                yield f"{path}.{name}", item, "module"
        elif isinstance(value, torch.optim.Optimizer):
            for number, state in enumerate(list(value.state.values())):
                yield f"{path}.state[{number}]", state, "optimizer"
            for name, item in vars(value).items():
                if name not in _OF_OPTIMIZERS:
                    yield f"{path}.{name}", item, ""
        elif callable(getattr(value, "state_dict", None)) and callable(
            getattr(value, "load_state_dict", None)
        ):
            try:
                state = value.state_dict()
            except Exception:  # of the object's own code
                return
            self._kept.append(state)
            yield f"{path}.state_dict()", state, "object"
        elif hasattr(value, "__dict__") and self._is_of_user(type(value)):
            for name, item in list(vars(value).items()):
                yield f"{path}.{name}", item, ""

    def _is_of_user(self, kind: type) -> bool:
        """Return whether a class is the user's: what a library keeps, its state_dict() says."""
        if kind not in self._kinds:
            module = sys.modules.get(kind.__module__)
            file = getattr(module, "__file__", None)
            is_named = kind.__module__ in ("__main__", "__mp_main__")
            self._kinds[kind] = is_named or (file is not None and _is_users(file))
        return self._kinds[kind]


def _key(key: Any) -> str:
    return repr(key) if isinstance(key, str | int) else type(key).__name__
