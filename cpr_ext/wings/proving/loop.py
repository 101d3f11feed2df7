"""The loop of a proof of functions: what a user's own loop does, in its shortest form."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from cpr_ext.checkpointer.checkpointer import Checkpointer
from cpr_ext.errors import UsageError
from cpr_ext.wings.proving.plan import Function, LifePlan


@dataclass
class Loop:
    """What ``train_step`` works with.

    Attributes:
        model, optimizers: what ``build`` made; ``optimizers`` as it returned them.
        others: what else it returned.
        checkpointer: of the model.
        state: what the last recovery gave back of callables (``Checkpointer(state=...)``).
    """

    model: nn.Module
    optimizers: Any
    others: tuple[Any, ...]
    checkpointer: Checkpointer
    state: Mapping[str, Any] = field(default_factory=dict)


def reference(name: str, function: Callable[..., Any] | None) -> Function | None:
    """Return where another process finds a function.

    Raises:
        UsageError: it finds none, such as a lambda or a function within another one.
    """
    if function is None:
        return None
    qualified = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", "")
    if "<" in qualified or not qualified or module not in sys.modules:
        raise UsageError(
            f"{name} is {qualified or function!r}; needed: a function at the top of a module, as "
            "each recovery is tried in a new process, which imports it"
        )
    file = inspect.getsourcefile(function)
    if file is None:
        raise UsageError(f"{name} has no source file that a new process could import")
    return Function(module, str(Path(file).resolve()), qualified)


def load(function: Function) -> Callable[..., Any]:
    """Return the function of a reference, imported here."""
    name = "__mp_main__" if function.module == "__main__" else function.module
    if name not in sys.modules:
        try:
            importlib.import_module(name)
        except ImportError:
            _import_file(name, function.file)
    found: Any = sys.modules[name]
    for part in function.name.split("."):
        found = getattr(found, part)
    loaded: Callable[..., Any] = found
    return loaded


def _import_file(name: str, file: str) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def run_functions(plan: LifePlan) -> None:
    """Train a user's functions as a plan says."""
    assert plan.build is not None
    assert plan.train_step is not None
    sys.path[:] = plan.path
    build, train_step = load(plan.build), load(plan.train_step)
    model, optimizers, *others = build()
    make = _make_default if plan.make_checkpointer is None else load(plan.make_checkpointer)
    with make(model, optimizers, "store", *others) as ckpt:
        report = ckpt.recover()
        job = Loop(model, optimizers, tuple(others), ckpt, report.state)
        while ckpt.step_count < plan.steps:
            num_samples = train_step(job, ckpt.step_count)
            ckpt.step(num_samples if isinstance(num_samples, int) else 1)


def _make_default(model: Any, optimizers: Any, directory: str, *others: Any) -> Checkpointer:
    state = {f"others[{n}]": o for n, o in enumerate(others) if hasattr(o, "load_state_dict")}
    return Checkpointer(model, optimizers, directory, state=state)
