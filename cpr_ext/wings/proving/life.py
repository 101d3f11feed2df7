"""One process of a proof: it runs the user's program, notes what it sees, and dies where it must.

It is a process of its own so that the methods of ``Checkpointer`` can be wrapped in it.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from cpr_ext.checkpointer.checkpointer import Checkpointer
from cpr_ext.checkpointer.options import StoreOptions
from cpr_ext.errors import SnapshotFailedWarning, UntrackedChangeWarning
from cpr_ext.saving.priorities import AllRows
from cpr_ext.state.precision import Precision
from cpr_ext.wings.proving.fingerprint import Print, leaves, write_prints
from cpr_ext.wings.proving.plan import LifeNotes, LifePlan
from cpr_ext.wings.proving.state import known_objects, settings_of, state_of
from cpr_ext.wings.proving.variables import GRADIENTS, variables_of

_MOST_CALLS = 100  # of a step whose inputs are noted
_POLL_SECONDS = 0.01


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by one that calls ``around(original, ...)``."""
    original = getattr(owner, name)

    def wrapper(*args: Any, **options: Any) -> Any:
        return around(original, *args, **options)

    setattr(owner, name, wrapper)


class Life:
    """Watches one Checkpointer: the one that was made last.

    Args:
        rank: of this process in its job.
    """

    def __init__(self, plan: LifePlan, rank: int = 0) -> None:
        self._plan = plan
        self._folder = Path(plan.directory)
        self._name = self._next_name(rank)
        self._notes = LifeNotes(self._folder / f"{self._name}.jsonl")
        self._notes.add("begun")
        self._ckpt: Checkpointer | None = None
        self._roots: set[int] = set()
        self._inputs: dict[str, Print] = {}
        self._losses: dict[str, Print] = {}
        self._has_begun = False  # the step in progress

    def _next_name(self, rank: int) -> str:
        number = len([*self._folder.glob(f"rank-{rank}-life-*.jsonl")])
        return f"rank-{rank}-life-{number}"

    def watch(self) -> None:
        """Wrap what is called in training."""
        wrap(Checkpointer, "__init__", self._made)
        wrap(Checkpointer, "step", self._stepped)
        wrap(Checkpointer, "recover", self._recovered)
        wrap(torch.autograd, "backward", self._went_back)
        wrap(warnings, "showwarning", self._warned)
        disable: Any = torch.compiler.disable
        register_module_forward_pre_hook(disable(self._is_called))

    def place(self, directory: Any) -> Path:
        """Return where a store is during the proof; the user's own stays as it is."""
        path, stores = Path(directory).absolute(), (self._folder / "stores").absolute()
        if stores in path.parents:
            return path
        stores.mkdir(parents=True, exist_ok=True)
        return stores / f"{path.name}-{zlib.crc32(str(path).encode()):08x}"

    def _made(
        self, original: Any, ckpt: Any, model: Any, optimizers: Any, directory: Any, **options: Any
    ) -> None:
        store = options.get("store", StoreOptions())
        given = {"priority": options.get("priority"), "precision": store.precision}
        own = {name: repr(each) for name, each in given.items() if each not in (None, Precision())}
        store = replace(store, precision=Precision(), remote=None)
        changed = {"priority": AllRows(), "store": store}
        original(ckpt, model, optimizers, self.place(directory), **{**options, **changed})
        self._ckpt = ckpt
        tables = [module for table in ckpt.tables for module in table.modules]
        self._roots = {id(module) for module in (ckpt.model, *tables)}
        self._notes.add(
            "made",
            options=own,
            optimizers=[type(each).__name__ for each in ckpt.optimizers],
            rows={table.name: table.num_embeddings for table in ckpt.tables},
        )

    def _recovered(self, original: Any, ckpt: Checkpointer, **options: Any) -> Any:
        report = original(ckpt, **options)
        if options.get("shards") is None:
            self._notes.add("recovered", step=report.step)
            self._write("recovered", report.step, state_of(ckpt, with_objects=False))
            self._end_step()
        return report

    def _stepped(self, original: Any, ckpt: Checkpointer, *args: Any, **options: Any) -> Any:
        handle = original(ckpt, *args, **options)
        if ckpt is self._ckpt:
            self._note_step(ckpt)
        return handle

    def _note_step(self, ckpt: Checkpointer) -> None:
        step, plan = ckpt.step_count, self._plan
        if not self._has_begun:
            self._begin_step(ckpt, sys._getframe(3))
        state = {**self._inputs, **self._losses, **state_of(ckpt, with_objects=True)}
        self._write("end", step, state)
        self._notes.add("step", step=step, inputs=len(self._inputs), losses=len(self._losses))
        self._end_step()
        if plan.kill_after is not None and step >= plan.kill_after:
            handle = ckpt.save("partial")
            ckpt.wait()
            if not handle.is_complete:
                handle = ckpt.save("base")
                ckpt.wait()
            self._notes.add("killed", step=step, kind=handle.kind, is_complete=handle.is_complete)
            self._wait_for_all(f"killed-{step}")
            os.kill(os.getpid(), signal.SIGKILL)
        if step >= plan.steps:
            self._notes.add("done", step=step)
            self._wait_for_all("done")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _wait_for_all(self, name: str) -> None:
        """Return when every process of the job is as far: until then they may need each other."""
        (self._folder / f"{name}-of-{self._name}").touch()
        while len([*self._folder.glob(f"{name}-of-*")]) < self._plan.world_size:
            time.sleep(_POLL_SECONDS)

    def _begin_step(self, ckpt: Checkpointer, frame: FrameType | None) -> None:
        self._has_begun = True
        left = sum(p.grad is not None and bool(p.grad.any()) for p in ckpt.model.parameters())
        found = {
            **settings_of(ckpt),
            GRADIENTS: Print("int", str(left)),
            **variables_of(frame, known_objects(ckpt)),
        }
        self._write("begin", ckpt.step_count + 1, found)

    def _end_step(self) -> None:
        self._inputs, self._losses, self._has_begun = {}, {}, False

    def _is_called(self, module: nn.Module, args: Any) -> None:
        ckpt = self._ckpt
        if ckpt is None or id(module) not in self._roots or not torch.is_grad_enabled():
            return
        if not module.training:
            return
        if not self._has_begun:
            self._begin_step(ckpt, sys._getframe(1))
        if len(self._inputs) < _MOST_CALLS:
            name = f"input {len(self._inputs) + 1} of {type(module).__name__}"
            for index, value in enumerate(args):
                self._inputs.update(leaves(f"{name}[{index}]", _plain(value)))

    def _went_back(self, original: Any, tensors: Any, *args: Any, **options: Any) -> Any:
        if len(self._losses) < _MOST_CALLS:
            self._losses.update(leaves(f"loss {len(self._losses) + 1}", tensors))
        return original(tensors, *args, **options)

    def _warned(self, original: Any, message: Any, category: Any, *args: Any, **more: Any) -> None:
        if issubclass(category, UntrackedChangeWarning | SnapshotFailedWarning):
            self._notes.add("warned", text=str(message))
        original(message, category, *args, **more)

    def _write(self, kind: str, step: int, prints: dict[str, Print]) -> None:
        write_prints(self._folder / f"{self._name}-{step}-{kind}.npz", prints)


def _plain(value: Any) -> Any:
    """Return the tensors of an object such as TorchRec's, as a dict."""
    if isinstance(value, torch.Tensor | list | tuple | dict) or not hasattr(value, "__dict__"):
        return value
    return {k: v for k, v in vars(value).items() if isinstance(v, torch.Tensor)}


def run(plan: LifePlan) -> None:
    """Run the program of a plan, as the interpreter would."""
    torch.manual_seed(plan.seed)
    np.random.seed(plan.seed)  # noqa: NPY002 - the generator users' code shares
    random.seed(plan.seed)
    sys.argv = [plan.script, *plan.arguments]
    sys.path[0] = str(Path(plan.script).resolve().parent)
    runpy.run_path(plan.script, run_name="__main__")


def main(plan_file: str) -> None:
    """Live as a plan says; the only process of its job."""
    plan = LifePlan.read(Path(plan_file))
    life = Life(plan)
    life.watch()
    run(plan)
    life._notes.add("ended")


if __name__ == "__main__":
    main(sys.argv[1])
