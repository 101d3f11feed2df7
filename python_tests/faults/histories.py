"""Random histories of stores and their copy, next to a model that knows every commit.

    python -m python_tests.faults.histories --histories 1000

Stores are trained, cloned, mixed, rolled back, repaired, lost and read from the copy. Each save has
a token, and the model knows the rows of each. A recovery must give the rows of its token, or not
claim them. A store may continue the copy exactly if the model says that it follows from it.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from cpr_ext.errors import CprError
from cpr_ext.maintenance import repair, verify
from python_tests.faults.mixtures import DIRECTORIES, NUM_ROWS, Run
from python_tests.storage.remote.faulty_objects import MemoryObjects

_OPERATIONS = ("train", "train", "clone", "mix", "twins", "roll back", "lose", "copy", "copy")


@dataclass
class Clone:
    """What the model knows of a store.

    Attributes:
        events: each change of it, from its creation on; a clone has those of its origin.
        is_known: False once it was mixed: nothing is known of its events.
    """

    directory: Path
    events: list[int] = field(default_factory=list)
    is_known: bool = True


class History:
    """One random history; ``faults`` is what was found wrong."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.faults: list[str] = []
        self.done: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._folder = folder
        self._objects = MemoryObjects()
        self._copied: list[int] = []  # events of the newest state of the copy
        self._rows: dict[int, torch.Tensor] = {}  # by token
        self._number = 0
        self._token = 0
        self._clones: list[Clone] = []

    def run(self, num_operations: int) -> list[str]:
        """Do so many operations."""
        with patch("cpr_ext.storage.remote.opening.open_objects", lambda options: self._objects):
            for _ in range(num_operations):
                name = self._draw.choice(_OPERATIONS) if self._clones else "train"
                self.done[name] += 1
                getattr(self, "_" + name.replace(" ", "_"))()
        return self.faults

    def _new(self) -> Clone:
        self._number += 1
        clone = Clone(self._folder / f"store{self._number}")
        self._clones.append(clone)
        return clone

    def _any(self) -> Clone:
        return self._draw.choice(self._clones)

    def _next(self) -> int:
        self._token += 1
        return self._token

    def _train(self) -> None:
        clone = self._any() if self._clones else self._new()
        if (run := self._opened(clone)) is not None:
            self._save(clone, run)
            run.release()

    def _save(self, clone: Clone, run: Run, kind: str = "") -> None:
        """Change some rows, differently each time, and save them."""
        token = self._next()
        rows = torch.tensor(self._draw.sample(range(NUM_ROWS), 20))
        run.optimizer.zero_grad()
        (0.5 * (run.model(rows) - token) ** 2).sum().backward()
        run.optimizer.step()
        run.checkpointer.step(1)
        run.token = token
        run.save(kind or self._draw.choice(("base", "partial", "partial")))
        self._rows[token] = run.model.weight.detach().clone()
        clone.events.append(token)

    def _clone(self) -> None:
        origin = self._any()
        clone = self._new()
        shutil.copytree(origin.directory, clone.directory)
        clone.events, clone.is_known = list(origin.events), origin.is_known

    def _mix(self) -> None:
        """Put a directory of another store in the place of this one's."""
        clone, other = self._any(), self._any()
        name = self._draw.choice(DIRECTORIES)
        if clone is other or not (other.directory / name).exists():
            return
        shutil.rmtree(clone.directory / name)
        shutil.copytree(other.directory / name, clone.directory / name)
        clone.is_known = False
        if (run := self._opened(clone)) is not None:
            run.release()

    def _twins(self) -> None:
        """Train a store and its clone equally far, and swap a shard: all numbers are equal."""
        origin = self._any()
        twin = Clone(origin.directory.with_name(f"twin{self._next()}"))
        shutil.copytree(origin.directory, twin.directory)
        for each in (origin, twin):
            if (run := self._opened(each)) is None:
                return
            self._save(each, run, "partial")
            run.release()
        name = self._draw.choice(DIRECTORIES[1:])
        shutil.rmtree(origin.directory / name)
        shutil.move(twin.directory / name, origin.directory / name)
        origin.is_known = False
        if (run := self._opened(origin)) is not None:
            run.release()

    def _roll_back(self) -> None:
        clone = self._any()
        if (run := self._opened(clone, mode="full")) is not None:
            clone.events.append(self._next())
            run.release()

    def _lose(self) -> None:
        """Read the copy into a new directory, which then continues it."""
        if not self._copied:
            return
        clone = self._new()
        clone.events = list(self._copied)
        if (run := self._opened(clone, remote=True)) is None:
            self.faults.append("the copy could not be read into an empty directory")
            return
        clone.events.append(self._next())  # it has claimed the copy
        self._copy_and_release(clone, run)

    def _copy(self) -> None:
        clone = self._any()
        follows = not self._copied or self._copied[-1] in clone.events
        run = self._opened(clone, remote=True, may_refuse=not (follows and clone.is_known))
        if run is None:
            return
        if clone.is_known and not follows:
            self.faults.append("a store continued a copy that it does not follow from")
        if self._draw.random() < 0.5:
            self._save(clone, run)
        self._copy_and_release(clone, run)

    def _copy_and_release(self, clone: Clone, run: Run) -> None:
        copy = run.checkpointer._parts.remote
        assert copy is not None
        if not copy.wait(30):
            self.faults.append(f"the copy ended: {copy.status()}")
        copy.close(30)
        self._copied = list(clone.events)
        run.release()

    def _opened(
        self, clone: Clone, *, mode: Any = "partial", remote: bool = False, may_refuse: bool = False
    ) -> Run | None:
        """Recover, after a repair if need be, and compare; None: it is refused for good."""
        options = {"remote": "memory:///"} if remote else {}
        try:
            return self._recovered(clone, mode, options)
        except CprError as error:
            text = str(error)
        if "cannot be copied" in text:
            if not may_refuse:
                self.faults.append(f"a store that follows from the copy is refused: {text}")
            return None
        if "no full-recovery point" in text:
            return None
        if clone.is_known:
            self.faults.append(f"refused: {text}")
        if not repair(clone.directory, apply=True).is_applied:
            self._clones = [each for each in self._clones if each is not clone]
            return None
        if not verify(clone.directory).is_sound:
            self.faults.append("a repaired store does not verify")
        clone.is_known = False
        try:
            return self._recovered(clone, "partial", options)
        except CprError as error:
            if "cannot be copied" not in str(error):
                self.faults.append(f"refused after its repair: {error}")
            return None

    def _recovered(self, clone: Clone, mode: Any, options: dict[str, Any]) -> Run:
        run = Run.at(clone.directory, extra_state=lambda: run.token, **options)
        try:
            report = run.checkpointer.recover(mode=mode)
        except BaseException:
            if (copy := run.checkpointer._parts.remote) is not None:
                copy.close(30)
            run.release()
            raise
        run.token = report.extra_state or 0
        if run.token:
            wrong = int((run.model.weight.detach() != self._rows[run.token]).any(1).sum())
            is_claimed = report.rows_stale is not None and report.rows_stale < wrong
            if wrong and (is_claimed or mode == "full"):
                self.faults.append(f"{wrong} rows are not those of the save, and nothing says so")
        return run


def main() -> int:
    """Make random histories; 1: something was wrong in one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--operations", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    started, num_faulty, done = time.monotonic(), 0, Counter[str]()
    for seed in range(options.seed, options.seed + options.histories):
        with tempfile.TemporaryDirectory() as temporary:
            history = History(Path(temporary), seed)
            for fault in history.run(options.operations):
                print(f"history {seed}: {fault}")
            num_faulty += bool(history.faults)
            done += history.done
    seconds = time.monotonic() - started
    print(f"{options.histories} histories, {num_faulty} wrong, {dict(done)}; {seconds:.0f} s")
    return 1 if num_faulty else 0


if __name__ == "__main__":
    sys.exit(main())
