"""Tries: a fault at a call, or a power cut after one, and what was found wrong afterwards."""

from __future__ import annotations

import gc
import importlib
import os
import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from python_tests.faults import forks
from python_tests.faults.interposer import (
    DEADLY,
    FAULTS,
    Call,
    Interposer,
    Logged,
    calls_of,
    read_log,
)
from python_tests.faults.invariant import check_stores, key_of
from python_tests.faults.journal import Journal, States, read_lines, read_promise
from python_tests.faults.model import State, build, train_step
from python_tests.faults.power_cut import Cut, Disk, Tree, cuts, read_tree, write_tree
from python_tests.faults.scenario import COPY, STORES, Watcher, run

_TIMEOUT_SECONDS = 60.0
# After which calls behind one that failed the power is cut: how far behind, and how many.
_CALLS_AFTER, _CUTS_AFTER = 60, 2
_ATTEMPTS = 5  # a few calls depend on what other threads have come to
NEVER_MADE = f"the call was never made in {_ATTEMPTS} runs"
Prepare = Callable[[Interposer], None]


class Told(NamedTuple):
    """What a try found wrong, and keys of what it checked and found right."""

    found: list[str]
    checked: list[bytes]


@dataclass(frozen=True)
class Recorded:
    """A run of the scenario without a fault."""

    directory: Path  # of its journal
    log: list[Logged]
    lines: list[str]

    @property
    def outcome(self) -> list[str]:
        """What a run tells of its success."""
        return outcome(self.lines)

    def promise_at(self, num_lines: int) -> tuple[object, ...]:
        """What was promised after so many lines, in a form to compare."""
        states = States(self.directory)
        promises = [read_promise(self.lines[:num_lines], name, states) for name in STORES]
        return tuple((tuple(p.allowed), tuple(p.complete)) for p in promises)


def _require_all_seen(log: Sequence[Logged], root: Path) -> None:
    """The log, replayed, makes what is really there: no change went past it."""
    disk = Disk()
    for call in log:
        disk.apply(call)
    real = read_tree(root)
    tree = disk.tree(lambda kind: True)
    differ = [p for p in real.keys() | tree.keys() if real.get(p, b"") != tree.get(p, b"")]
    assert real.keys() == tree.keys(), f"not in the log, or only there: {real.keys() ^ tree.keys()}"
    assert not differ, f"changed past the log: {differ}"


def outcome(lines: Sequence[str]) -> list[str]:
    """The promises made, without the states: how many steps a capture takes is up to the disk."""
    told = [line.split() for line in lines if line.startswith("acknowledged")]
    return [" ".join(words[:2]) for words in told]


class Harness:
    """Runs the scenario in children of this process, which must never start a thread.

    Args:
        directory: for journals and stores, a fast one: what ``fsync`` does is told by the log.
        prepare: called in each child before the scenario: takes something out of the code.
    """

    def __init__(self, directory: Path, prepare: Prepare = lambda interposer: None) -> None:
        self.directory = directory
        self._interposer = Interposer()
        self._prepare = prepare
        self._checked: set[bytes] = set()
        torch.set_num_threads(1)
        warm_up()

    def record(self, keep: Path | None = None) -> Recorded:
        """Run the scenario once, without a fault, and write its calls down.

        Args:
            keep: a directory where the record is left, or found if it lies there already.
        """
        kept = keep / "recorded" if keep is not None else None
        if kept is not None and kept.exists():
            journal = kept / "journal"
            return Recorded(journal, read_log(journal), read_lines(journal))
        place = self.directory / "recorded"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        ended = self._run(place, None, None, log=True)
        lines = read_lines(place / "journal")
        if ended.error or lines[-1:] != ["done"]:
            raise AssertionError(f"the scenario fails without any fault: {ended.error}")
        log = read_log(place / "journal")
        _require_all_seen(log, place / "root")
        if kept is not None:
            half = kept.with_suffix(".half")
            shutil.rmtree(half, ignore_errors=True)
            shutil.copytree(place / "journal", half / "journal")
            half.rename(kept)
        return Recorded(place / "journal", log, lines)

    def note_checked(self, keys: Iterable[bytes]) -> None:
        """What need not be checked again: nothing was found wrong with it."""
        self._checked.update(keys)

    def try_fault(self, fault: str, call: Call, clean: Sequence[str], place: Path) -> Told:
        """What is wrong after ``fault`` happened to ``call``; runs in a child of its own.

        Args:
            clean: the outcome of the scenario without a fault.
        """
        here, ended = self._run_until_hit(place, fault, call)
        if not (ended.error or ended.result):
            return Told([NEVER_MADE], [])
        journal = here / "journal"
        lines, states, keys = read_lines(journal), States(journal), []
        if fault in DEADLY:
            found = [] if ended.signal == 9 else [f"it was not killed: {ended.error or 'it ended'}"]
        else:
            found = _check_end(fault, lines, clean, ended)
        copy = journal / COPY
        if copy.exists():
            num_lines = int((copy / "num_lines").read_text())
            (copy / "num_lines").unlink()
            told = self._check(copy, lines[:num_lines], states)
            found += [f"at the first promise after it: {text}" for text in told.found]
            keys += told.checked
        told = self._check(here / "root", lines, states)
        return Told(found + told.found, keys + told.checked)

    def _check(self, root: Path, lines: Sequence[str], states: States) -> Told:
        key = key_of(root, lines, states)
        if key in self._checked:
            return Told([], [])
        found = check_stores(root, lines, states)
        return Told(found, [] if found else [key])

    def try_cut(self, cut: Cut, tree: Tree, recorded: Recorded, place: Path) -> Told:
        """What is wrong with what a power cut left; runs in a child of its own."""
        return self._check_cut(cut, tree, recorded, place / "cut")

    def _check_cut(self, cut: Cut, tree: Tree, recorded: Recorded, root: Path) -> Told:
        root.mkdir()
        write_tree(tree, root)
        lines = recorded.lines[: cut.num_lines]
        return self._check(root, lines, States(recorded.directory))

    def try_error_and_cuts(self, call: Call, seed: str, place: Path) -> Told:
        """What power cuts leave of a run in which ``call`` failed: at drawn calls from there on."""
        here, ended = self._run_until_hit(place, "EIO", call, log=True)
        if ended.error or not ended.result:
            return Told([ended.error or NEVER_MADE], [])
        journal = here / "journal"
        recorded = Recorded(journal, read_log(journal), read_lines(journal))
        calls = calls_of(recorded.log)
        chance = random.Random(seed)
        after = range(calls.index(call) + 1, len(calls) + 1)[:_CALLS_AFTER]
        drawn = set(chance.sample(after, min(_CUTS_AFTER, len(after))))
        found: list[str] = []
        keys: list[bytes] = []
        for cut, tree in cuts(
            recorded.log, recorded.promise_at, reorderings=1, concerns=drawn.__contains__
        ):
            if tree is None:
                continue
            told = self._check_cut(cut, tree, recorded, here / str(cut))
            found += [f"cut {cut}: {text}" for text in told.found]
            keys += told.checked
        return Told(found, keys)

    def _run_until_hit(
        self, place: Path, fault: str, call: Call, *, log: bool = False
    ) -> tuple[Path, forks.Ended]:
        for attempt in range(_ATTEMPTS):
            here = place / str(attempt)
            here.mkdir()
            ended = self._run(here, fault, call, log=log)
            if ended.error or ended.result:
                break
        return here, ended

    def _run(
        self, place: Path, fault: str | None, call: Call | None, *, log: bool = False
    ) -> forks.Ended:
        root, journal = place / "root", place / "journal"
        root.mkdir()
        journal.mkdir()
        action = partial(self._scenario, root, journal, fault, call, log)
        return forks.call(action, place / "scenario", _TIMEOUT_SECONDS)

    def _scenario(
        self, root: Path, directory: Path, fault: str | None, call: Call | None, log: bool
    ) -> int:
        interposer = self._interposer
        journal = Journal(directory, interposer.mark)
        if log:
            interposer.log_to(directory)
        interposer.watch(root)
        self._prepare(interposer)
        if fault is not None and call is not None:
            interposer.plan(fault, call)

        def state_of_fault() -> str:
            if fault is None or interposer.hits == 0:
                return "to come"
            return "over" if interposer.hits >= FAULTS[fault][2] else "under way"

        run(Watcher(root, journal, state_of_fault))
        return interposer.hits


def _check_end(
    fault: str, lines: Sequence[str], clean: Sequence[str], ended: forks.Ended
) -> list[str]:
    """What is wrong with how a run ended that survived its fault."""
    if ended.error or lines[-1:] != ["done"]:
        return [f"training was stopped: {ended.error}"]
    told = outcome(lines)
    reported = [line for line in lines if line.startswith("reported")]
    if FAULTS[fault][1] == 0 and (reported or told != clean):
        return [f"harmless, but {reported or told}"]
    if not reported and told != clean:
        return [f"nothing was reported, but {told} instead of {clean}"]
    return _check_after(lines)


def _check_after(lines: Sequence[str]) -> list[str]:
    """What is wrong with what came after the fault: once a snapshot was saved, nothing fails."""
    events = [line.split() for line in lines]
    names = [event[0] for event in events]
    if "over" not in names or "acknowledged" not in names[names.index("over") :]:
        return []
    events = events[names.index("acknowledged", names.index("over")) :]
    found = [f"still failing: {' '.join(event)}" for event in events if event[0] == "reported"]
    saved = {tuple(event[1:3]) for event in events if event[0] == "acknowledged"}
    captured = [event for event in events if event[0] == "captured"]
    return found + [f"never saved: {e}" for e in captured if tuple(e[1:3]) not in saved]


def warm_up() -> None:
    """What every child needs is imported and done once."""
    importlib.import_module("cpr_ext.checkpointer")
    model, optimizers = build(0)
    train_step(model, optimizers)
    State.of(model, optimizers)
    # A collection in a child would copy the memory that it shares with its parent.
    gc.collect()
    gc.freeze()
    gc.disable()


def fast_directory() -> str | None:
    """Where temporary files cost least; None: the default."""
    shared = "/dev/shm"
    return shared if os.access(shared, os.W_OK) else None
