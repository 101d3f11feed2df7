"""Every fault at every call that reads, of all that reads a store: part of ``make crash-test``.

python -m python_tests.faults read_side                      all of them
python -m python_tests.faults read_side --sample 100 --seed 3
python -m python_tests.faults read_side --replay export EIO openr:dense/MANIFEST.json:2 stays
python -m python_tests.faults read_side --teeth 100          planted mistakes must be found

No acknowledged state is removed, or replaced by an older one, because something could not be read.
A reader returns what it returns without the fault, or raises StorageError.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import cpr_ext
from cpr_ext import maintenance, reading, segment_header
from cpr_ext._native import native
from cpr_ext.errors import DamageError, StorageError
from cpr_ext.retention import Retention
from python_tests.faults import forks
from python_tests.faults.harness import _warm_up, fast_directory
from python_tests.faults.interposer import READ_OPS, Call, Interposer, calls_of, read_log
from python_tests.faults.invariant import Fresh
from python_tests.faults.model import TABLES

_TIMEOUT_SECONDS = 60.0
_NUM_SHARDS = 2
ONCE, STAYS = "once", "stays"


class Try(NamedTuple):
    """A fault at a call of an action; once, or for all further calls of that name."""

    action: str
    fault: str
    call: Call
    lasts: str

    def __str__(self) -> str:
        return f"{self.action} {self.fault} {self.call} {self.lasts}"


def _digest(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _recover(store: Path, _: Path, **options: Any) -> Any:
    fresh = Fresh(store, _NUM_SHARDS, retention=Retention(3))
    try:
        report = fresh.checkpointer.recover(**options)
        return report.step, hashlib.sha256(fresh.state.to_bytes()).hexdigest()
    finally:
        fresh.checkpointer.close()


def _verify(store: Path, _: Path) -> Any:
    report = maintenance.verify(store)
    return report.damaged, report.left_overs


def _export(store: Path, place: Path) -> Any:
    maintenance.export(store, place / "out")
    return hashlib.sha256((place / "out" / "model.safetensors").read_bytes()).hexdigest()


def _read_rows(store: Path, _: Path) -> Any:
    name, (num_rows, _dim) = "tables.big", TABLES["big"]
    return _digest(maintenance.read_rows(store, name, range(num_rows)).arrays["weight"])


def _inspect(store: Path, _: Path) -> Any:
    summary = maintenance.inspect(store)
    return len(summary.points), summary.file_bytes


def _repair(store: Path, _: Path) -> Any:
    report = maintenance.repair(store, apply=True)
    return report.damaged, report.actions


def _compact(store: Path, _: Path) -> Any:
    return maintenance.compact(store).segments_after


ACTIONS: dict[str, Callable[[Path, Path], Any]] = {
    "recover": _recover,
    "recover-raise": partial(_recover, on_damage="raise"),
    "recover-full": partial(_recover, mode="full"),
    "fall-back": partial(_recover, on_read_error="fall_back"),
    "move": lambda store, place: _recover_from(store, place),
    "verify": _verify,
    "export": _export,
    "compact": _compact,
    "read-rows": _read_rows,
    "inspect": _inspect,
    "repair": _repair,
}


def _recover_from(store: Path, place: Path) -> Any:
    return _recover(place / "new", place, from_store=store)


class ReadSide:
    """Runs actions in children of this process, which must never start a thread.

    Args:
        plant: called in the child before the action: plants a mistake.
    """

    def __init__(self, directory: Path, plant: Callable[[], None] = lambda: None) -> None:
        self.directory = directory
        self._interposer = Interposer()
        self._plant = plant
        self._original = directory / "original"
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)
        reading.pauses_seconds = (0.0, 0.0)
        _warm_up()
        self._call(self._make, "make")
        self._newest = self._call(partial(self._look, self._original), "look")
        self._clean: dict[str, Any] = {}

    def _call(self, action: Callable[[], Any], name: str) -> Any:
        ended = forks.call(action, self.directory / name, _TIMEOUT_SECONDS)
        if ended.error:
            raise AssertionError(ended.error)
        return ended.result

    def _make(self) -> None:
        run = Fresh(self._original, _NUM_SHARDS, retention=Retention(3))
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
            return _recover(copy, copy)
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

    def tasks(self, tries: Sequence[Try]) -> Iterator[forks.Task]:
        """What to run for them."""
        return ((each, partial(self.attempt, each)) for each in tries)

    def attempt(self, tried: Try, place: Path) -> tuple[list[str], int, bool]:
        """What is wrong after it, how often the fault happened, and whether it was survived."""
        store = shutil.copytree(self._original, place / "store")
        ended = forks.call(partial(self._act, tried, store, place), place / "act", _TIMEOUT_SECONDS)
        if ended.error:
            return [ended.error], 0, False
        result, error, hits = ended.result
        found = []
        if error and not error.startswith("StorageError"):
            found.append(f"it raised {error}")
        if not error and tried.action != "fall-back" and result != self._clean[tried.action]:
            found.append(f"it returned {result}, not {self._clean[tried.action]}")
        after = forks.call(partial(self._after, store), place / "after", _TIMEOUT_SECONDS)
        found += [after.error] if after.error else after.result
        return found, hits, not error

    def _act(self, tried: Try, store: Path, place: Path) -> tuple[Any, str, int]:
        self._plant()
        self._interposer.watch(store)
        self._interposer.plan_read(tried.fault, tried.call, stays=tried.lasts == STAYS)
        try:
            result, error = ACTIONS[tried.action](store, place), ""
        except Exception as wrong:
            kind = "StorageError" if isinstance(wrong, StorageError) else type(wrong).__name__
            result, error = None, f"{kind}: {wrong}"
        hits = self._interposer.hits
        self._interposer.watch(Path("/nowhere"))
        return result, error, hits

    def _after(self, store: Path) -> list[str]:
        report = maintenance.verify(store)
        if not report.is_sound:
            return [f"afterwards verify says {report.damaged}"]
        held = self._look(store)
        return [] if held == self._newest else [f"afterwards it holds {held}, not {self._newest}"]


# --- planted mistakes ---


def _headers_that_fail_are_damaged() -> None:
    read = segment_header.retrying_segment

    def believe(path: Path, action: Callable[[], Any]) -> Any:
        try:
            return read(path, action)
        except StorageError as error:
            raise DamageError(str(error)) from error

    segment_header.retrying_segment = believe


def _rows_that_fail_are_damaged() -> None:
    for name in ("restore_segment", "restore_segments"):
        real = getattr(native, name)

        def believe(*arguments: Any, real: Any = real, **options: Any) -> Any:
            return real(*arguments, **{**options, "unreadable_is_damage": True})

        setattr(native, name, believe)
    reading.UnreadableError = DamageError  # type: ignore[misc]


def _falling_back_forgets() -> None:
    roll_back = cpr_ext.store.Store.roll_back
    cpr_ext.store.Store.roll_back = (  # type: ignore[method-assign]
        lambda self, snapshot, keep=(): roll_back(self, snapshot)
    )


# What it is, who reads with it, and which calls show it.
PLANTED: dict[str, tuple[Callable[[], None], tuple[str, ...], str]] = {
    "headers that cannot be read are damaged": (
        _headers_that_fail_are_damaged,
        ("recover",),
        "openr:dense/0000000",
    ),
    "rows that cannot be read are damaged": (
        _rows_that_fail_are_damaged,
        ("recover",),
        "pread:",
    ),
    "falling back forgets what it could not read": (
        _falling_back_forgets,
        ("fall-back",),
        "openr:dense/0000000",
    ),
}


def teeth(directory: Path, count: int, seed: int, jobs: int) -> int:
    """How many planted mistakes were missed."""
    missed = 0
    for number, (name, (plant, actions, calls)) in enumerate(PLANTED.items()):
        place = directory / f"teeth-{number}"
        place.mkdir()
        side = ReadSide(place, plant)
        tries = [t for t in side.tries(actions) if str(t.call).startswith(calls)]
        tries = [t for t in tries if t.lasts == STAYS]
        drawn = random.Random(seed).sample(tries, min(count, len(tries)))
        done = list(forks.run_all(side.tasks(drawn), place, jobs=jobs))
        found = sum(bool(ended.error or ended.result[0]) for _, ended in done)
        print(f"{name}: found {found} of {len(done)}", flush=True)
        missed += found == 0
    return missed


def main() -> int:
    """0 if nothing was found wrong, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="tries at a time")
    parser.add_argument("--sample", type=int, help="so many tries, drawn, instead of all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--teeth", type=int, help="plant mistakes, so many tries of each")
    parser.add_argument("--replay", nargs=4, metavar=("ACTION", "FAULT", "CALL", "LASTS"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=fast_directory(), prefix="cpr-reads-") as directory:
        place = Path(directory)
        if options.teeth:
            return int(teeth(place, options.teeth, options.seed, options.jobs) > 0)
        return _campaign(ReadSide(place), place, options)


def _campaign(side: ReadSide, place: Path, options: argparse.Namespace) -> int:
    started = time.monotonic()
    tries = list(side.tries(list(ACTIONS)))
    if options.replay:
        tries = [each for each in tries if str(each) == " ".join(options.replay)]
    elif options.sample:
        tries = random.Random(options.seed).sample(tries, min(options.sample, len(tries)))
    count: Counter[str] = Counter()
    hit: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    done = forks.run_all(side.tasks(tries), place, jobs=options.jobs)
    for tried, ended in tqdm(done, total=len(tries), unit=" tries", smoothing=0):
        found, hits, is_survived = ([ended.error], 0, False) if ended.error else ended.result
        count[tried.action] += 1
        hit[tried.action] += hits > 0
        survived[tried.action] += hits > 0 and is_survived
        failed[tried.action] += bool(found)
        if found:
            tqdm.write("\n    ".join([f"VIOLATION {tried}", *found]), file=sys.stdout)
    print(f"\n{'action':14} {'tries':>7} {'hit':>7} {'survived':>9} {'violations':>11}")
    for action, number in count.items():
        print(f"{action:14} {number:7} {hit[action]:7} {survived[action]:9} {failed[action]:11}")
    totals = [sum(counter.values()) for counter in (count, hit, survived, failed)]
    print("all            {:7} {:7} {:9} {:11}".format(*totals), end="   ")
    print(f"in {time.monotonic() - started:.0f} s")
    print("survived: the result was right; the others raised StorageError")
    return 1 if failed.total() or not count else 0


if __name__ == "__main__":
    sys.exit(main())
