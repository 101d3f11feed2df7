"""Tries of failing reads: many in one child, one after the other, as a process that goes on."""

from __future__ import annotations

import gc
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

import cpr_ext
from cpr_ext.errors import StorageError
from cpr_ext.storage import retries
from cpr_ext.storage.retention import Retention
from cpr_ext.wings.tools import maintenance
from python_tests.faults import forks
from python_tests.faults.harness import warm_up
from python_tests.faults.interposer import READ_OPS, Call, Interposer, calls_of, read_log
from python_tests.faults.invariant import Fresh
from python_tests.faults.power_cut import fingerprint, read_tree
from python_tests.faults.read_actions import ACTIONS, NUM_SHARDS, recover

_TIMEOUT_SECONDS = 60  # of a try
_GONE_WITHIN_SECONDS = 5  # threads that were joined
_TRIES_PER_CHILD = 25  # a child touches most pages of its parent once, which costs as much as three
ONCE, STAYS = "once", "stays"


class Try(NamedTuple):
    """A fault at a call of an action; once, or for all further calls of that name."""

    action: str
    fault: str
    call: Call
    lasts: str

    def __str__(self) -> str:
        return f"{self.action} {self.fault} {self.call} {self.lasts}"


class Told(NamedTuple):
    """What is wrong after a try, how often the fault happened, and whether it was survived."""

    found: list[str]
    hits: int
    is_survived: bool


class _Batch(NamedTuple):
    tries: list[Try]
    place: Path


class ReadSide:
    """Runs actions in children of this process, which must never start a thread.

    A store that is byte for byte as one that was found right is not looked at again.

    Args:
        plant: called in each child before its actions: plants a mistake.
    """

    def __init__(self, directory: Path, plant: Callable[[], None] = lambda: None) -> None:
        self.directory = directory
        self._interposer = Interposer()
        self._plant = plant
        self._original = directory / "original"
        self._num_batches = 0
        self._right: set[bytes] = set()  # fingerprints of stores that were looked at
        self._clean: dict[str, Any] = {}
        torch.set_num_threads(1)
        retries.pauses_seconds = (0.0, 0.0)
        warm_up()
        self._call(self._make, "make")
        self._newest = self._call(partial(self._look, self._original), "look")

    def _call(self, action: Callable[[], Any], name: str) -> Any:
        ended = forks.call(action, self.directory / name, _TIMEOUT_SECONDS)
        if ended.error:
            raise AssertionError(ended.error)
        return ended.result

    def _make(self) -> None:
        run = Fresh(self._original, NUM_SHARDS, store=cpr_ext.StoreOptions(None, Retention(3)))
        for seq in range(3):
            for _ in range(2):
                run.train()
            run.seq = seq
            run.checkpointer.save("partial")
            run.checkpointer.wait()
        run.checkpointer.close()

    def _look(self, store: Path) -> Any:
        """What the store holds, looked at on a copy."""
        copy = self.directory / f"{store.parent.name}-{store.name}-look"
        shutil.copytree(store, copy)
        try:
            return recover(copy, copy)
        finally:
            shutil.rmtree(copy)

    def calls(self, action: str) -> list[Call]:
        """The calls that the action reads with; its result is kept to compare with."""
        place = self.directory / f"record-{action}"
        place.mkdir()
        self._clean[action] = self._call(partial(self._record, action, place), f"clean-{action}")
        found = [call for call in calls_of(read_log(place)) if call.op in READ_OPS]
        shutil.rmtree(place)
        return found

    def _record(self, action: str, place: Path) -> Any:
        store = shutil.copytree(self._original, place / "store")
        self._interposer.log_to(place)
        self._interposer.watch(store)
        self._interposer.see_reads()
        return ACTIONS[action](store, place)

    def tries(self, actions: Sequence[str]) -> Iterator[Try]:
        """All of them."""
        for action in actions:
            for call in self.calls(action):
                for fault in READ_OPS[call.op]:
                    for lasts in (ONCE, STAYS):
                        if (fault, lasts) != ("short", STAYS):
                            yield Try(action, fault, call, lasts)

    def run(self, tries: Iterable[Try], *, jobs: int) -> Iterator[tuple[Try, Told]]:
        """Do them, ``jobs`` children at a time; each once told, in the order of ending."""
        batches = self._batches(tries)
        while True:
            left: list[Try] = []
            tasks = ((batch, partial(self._do, batch)) for batch in batches)
            timeout = _TIMEOUT_SECONDS * (_TRIES_PER_CHILD + 1)
            for batch, ended in forks.run_all(
                tasks, self.directory, jobs=jobs, timeout_seconds=timeout
            ):
                yield from self._told(batch, ended, left)
                shutil.rmtree(batch.place)
            if not left:
                return
            batches = self._batches(left)

    def _batches(self, tries: Iterable[Try]) -> Iterator[_Batch]:
        waiting = iter(tries)
        while some := list(islice(waiting, _TRIES_PER_CHILD)):
            yield self._batch(some)

    def _batch(self, tries: list[Try]) -> _Batch:
        self._num_batches += 1
        place = self.directory / f"batch-{self._num_batches}"
        place.mkdir()
        return _Batch(tries, place)

    def _told(
        self, batch: _Batch, ended: forks.Ended, left: list[Try]
    ) -> Iterator[tuple[Try, Told]]:
        """What a child told of its tries; those behind the one that ended it are ``left``."""
        told = _read_told(batch.place)
        for number, each in enumerate(told):
            yield batch.tries[number], self._confirmed(batch, number, each)
        if len(told) < len(batch.tries):
            why = "it took too long" if ended.signal == signal.SIGALRM else ended.error
            yield batch.tries[len(told)], Told([why], 0, False)
            left += batch.tries[len(told) + 1 :]

    def _confirmed(self, batch: _Batch, number: int, told: tuple[Told, bytes]) -> Told:
        """With what its store holds; what found something or met no fault is tried again alone."""
        seen = self._with_store(batch, number, *told)
        if (seen.hits and not seen.found) or len(batch.tries) == 1:
            return seen
        alone = self._batch([batch.tries[number]])
        ended = forks.call(partial(self._do, alone, alone.place), alone.place / "out", 1e9)
        again = next(told for _, told in self._told(alone, ended, []))
        shutil.rmtree(alone.place)
        if seen.found and not again.found:
            before = f"only behind {number} others in one process"
            return again._replace(found=[f"{text} ({before})" for text in seen.found])
        return again

    def _with_store(self, batch: _Batch, number: int, told: Told, tree: bytes) -> Told:
        if tree in self._right:
            return told
        place = batch.place / str(number)
        after = partial(self._after, place / "store")
        ended = forks.call(after, place / "after", _TIMEOUT_SECONDS)
        wrong = [ended.error] if ended.error else ended.result
        if not wrong:
            self._right.add(tree)
        return told._replace(found=[*told.found, *wrong])

    def _after(self, store: Path) -> list[str]:
        report = maintenance.verify(store)
        if not report.is_sound:
            return [f"afterwards verify says {report.damaged}"]
        held = self._look(store)
        return [] if held == self._newest else [f"afterwards it holds {held}, not {self._newest}"]

    # --- in the child ---

    def _do(self, batch: _Batch, _: Path) -> None:
        self._plant()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        with (batch.place / "told").open("wb") as out:
            for number, tried in enumerate(batch.tries):
                place = batch.place / str(number)
                place.mkdir()
                signal.alarm(_TIMEOUT_SECONDS)
                told = self._attempt(tried, place)
                tree = fingerprint(read_tree(place / "store"))
                signal.alarm(0)
                if tree in self._right:
                    shutil.rmtree(place)
                pickle.dump((told, tree), out)
                out.flush()

    def _attempt(self, tried: Try, place: Path) -> Told:
        store = shutil.copytree(self._original, place / "store")
        before = _left_behind()
        self._interposer.watch(store)
        self._interposer.plan_read(tried.fault, tried.call, stays=tried.lasts == STAYS)
        try:
            result, error = ACTIONS[tried.action](store, place), ""
        except Exception as wrong:
            kind = "StorageError" if isinstance(wrong, StorageError) else type(wrong).__name__
            result, error = None, f"{kind}: {wrong}"
        hits = self._interposer.hits
        self._interposer.watch(Path("/nowhere"))
        gc.collect()
        found = []
        if error and not error.startswith("StorageError"):
            found.append(f"it raised {error}")
        if not error and result != self._clean[tried.action]:
            found.append(f"it returned {result}, not {self._clean[tried.action]}")
        if left := _still_left_behind(before):
            found.append(f"left behind: {', '.join(sorted(left))}")
        return Told(found, hits, not error)


def _read_told(place: Path) -> list[tuple[Told, bytes]]:
    told = []
    with (place / "told").open("rb") as file:
        while True:
            try:
                told.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):  # killed while it told
                return told


def _still_left_behind(before: set[str]) -> set[str]:
    """What is there now and was not before, and stays: Linux lists a joined thread a while more."""
    limit = time.monotonic() + _GONE_WITHIN_SECONDS
    while (left := _left_behind() - before) and time.monotonic() < limit:
        time.sleep(0.01)
    return left


def _left_behind() -> set[str]:
    """Files that this process has open, and its threads."""
    found = {f"thread {path.name}" for path in Path("/proc/self/task").iterdir()}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found.add(f"file {path.name} {path.readlink()}")
    return found
