"""Stores whose parts are of different commits: recovery is exact, or they are refused.

    python -m python_tests.faults.mixtures

A store is copied after each of four snapshots. Each mixture takes its manifest, the one before and
its segments from any of the copies. A row has the number of the step that trained it last, so each
row shows what it is.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cpr_ext
from cpr_ext.errors import CprError
from cpr_ext.wings.tools.maintenance import repair, verify
from python_tests.helpers import open_checkpointer

NUM_ROWS = 300
_FIRST, _LAST = 3, 6
PARTS = ("MANIFEST.json", "MANIFEST.prev", "segments")


def looked_up(step: int) -> torch.Tensor:
    """The rows that a step trains: every one of some, and few of all."""
    return torch.arange(NUM_ROWS)[torch.arange(NUM_ROWS) * (step + 3) % 7 < 2]


@dataclass
class Run:
    """A model of one table, and its checkpointer."""

    model: nn.Embedding
    optimizer: torch.optim.Optimizer
    checkpointer: cpr_ext.Checkpointer
    token: int = 0  # of the user's extra state

    @classmethod
    def at(cls, directory: Path, **options: Any) -> Run:
        """Return a run on a store."""
        model = nn.Embedding(NUM_ROWS, 2, sparse=True)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        checkpointer = open_checkpointer(
            model,
            optimizer,
            directory,
            **{
                "num_shards": 2,
                "priority": cpr_ext.AllRows(),
                "schedule": cpr_ext.EverySteps(10**9),
                "store": cpr_ext.StoreOptions(None, cpr_ext.Retention(2)),
                "save_at_close": False,
                **options,
            },
        )
        return cls(model, optimizer, checkpointer)

    def train(self) -> int:
        """Train a step: its rows get its number."""
        step = self.checkpointer.step_count + 1
        self.optimizer.zero_grad()
        (0.5 * (self.model(looked_up(step)) - step) ** 2).sum().backward()
        self.optimizer.step()
        self.checkpointer.step(1)
        return step

    def save(self, kind: Any) -> None:
        """Save, and wait for it."""
        self.checkpointer.save(kind)
        self.checkpointer.wait()

    def wrong_rows(self, step: int) -> int:
        """Count the rows that are not as they were after a step."""
        expected = torch.zeros(NUM_ROWS)
        for number in range(1, step + 1):
            expected[looked_up(number)] = number
        return int((self.model.weight.detach() != expected[:, None]).any(1).sum())

    def release(self) -> None:
        """Give the store back, as a process that ends does."""
        self.checkpointer._release()


def make_copies(folder: Path, kind: str) -> list[int]:
    """Train, save partial or base snapshots, and copy the store after the last ones."""
    run = Run.at(folder / "store")
    run.checkpointer.recover()
    for step in range(1, _LAST + 1):
        run.train()
        run.save("base" if step == 1 or (kind == "base" and step > 2) else "partial")
        if step >= _FIRST:
            shutil.copytree(folder / "store", folder / f"copy{step}")
    run.release()
    return list(range(_FIRST, _LAST + 1))


def mixtures(copies: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield of which copy each part is."""
    return itertools.product(copies, repeat=len(PARTS))


def mix(folder: Path, of: tuple[int, ...], place: Path) -> Path:
    """Make a store of parts of several copies."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name, copy in zip(PARTS, of, strict=True):
        put_part(folder / f"copy{copy}" / name, place / name)
    return place


def put_part(source: Path, target: Path) -> None:
    """Put a file or a directory in the place of what is there."""
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copy2(source, target)


def try_mixture(store: Path) -> tuple[str, str]:
    """Recover, after a repair if need be; what happened, and what is wrong with it."""
    try:
        return recover(store, "raise")
    except CprError:
        if verify(store).is_sound:
            return "refused", "it is refused, and verifies"
    report = repair(store, apply=True)
    if not report.is_applied:
        return "refused, not repaired", "" if report.lost else f"nothing is lost: {report}"
    if not verify(store).is_sound:
        return "repaired", "it does not verify after its repair"
    found, wrong = recover(store, "raise")
    return f"repaired, {found}", wrong


def recover(store: Path, on_damage: Any = "fall_back") -> tuple[str, str]:
    """Return "exact" or "older", and what is wrong."""
    run = Run.at(store)
    try:
        report = run.checkpointer.recover(on_damage=on_damage)
    finally:
        run.release()
    if not (count := run.wrong_rows(report.step)):
        return "exact", ""
    return "older", f"{count} rows of step {report.step} are wrong, {report.rows_stale} stale"


def main() -> int:
    """Try every mixture; 1: a recovery was wrong."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        for kind in ("partial", "base"):
            folder, found = Path(temporary) / kind, Counter[str]()
            folder.mkdir()
            for of in mixtures(make_copies(folder, kind)):
                what, wrong = try_mixture(mix(folder, of, folder / "mixed"))
                found[what] += 1
                faults += [f"{kind} {of}: {wrong}"] if wrong else []
            print(f"{kind}: {found.total()} mixtures: {dict(found)}")
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
