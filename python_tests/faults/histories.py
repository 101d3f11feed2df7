"""Random histories of stores, their copy, publications and jobs, next to a model of every commit.

    python -m python_tests.faults.histories --histories 1000

Stores are trained, cloned, mixed, put back, rolled back, repaired, lost, cut off in the middle of a
save, and read from the copy. Each save has a token, and the model knows the rows of each. What is
recovered must be the rows of its token, or not be claimed, and the token one that the model allows.
A store may continue the copy exactly if the model says that it follows from it.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import cpr_ext
from cpr_ext.errors import CprError
from cpr_ext.wings.remote import RemoteOptions
from cpr_ext.wings.remote.fetching import fetch_store
from cpr_ext.wings.tools.maintenance import repair, verify
from python_tests.faults.history_jobs import Jobs
from python_tests.faults.history_model import Clone, Objects, cut_off
from python_tests.faults.history_publications import Publications
from python_tests.faults.mixtures import NUM_ROWS, PARTS, Run, put_part

STORES = ("train", "train", "clone", "mix", "twins", "roll back", "cut off", "put back")
COPIES = ("copy", "copy", "lose", "lose twice", "lose directory")
PUBLICATIONS = (
    *("publish", "publish", "consume", "consume"),
    *("keep publication", "restore", "fork publication"),
)
JOBS = ("start job", "start job", "move worker")
OPERATIONS = (*STORES, *COPIES, *PUBLICATIONS, *JOBS)
ALL_ROWS = range(NUM_ROWS)
ROWS_OF_SHARDS = (range(NUM_ROWS // 2), range(NUM_ROWS // 2, NUM_ROWS))


@contextmanager
def objects_of_all(objects: Objects) -> Iterator[None]:
    """Let all addresses lead to these objects in the block."""
    with patch("cpr_ext.wings.remote.opening.open_objects", lambda options: objects):
        yield


class History:
    """One random history; ``faults`` is what was found wrong."""

    def __init__(self, folder: Path, seed: int, operations: Sequence[str] = OPERATIONS) -> None:
        self.faults: list[str] = []
        self.done: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._folder = folder
        self._operations = operations
        self._objects = Objects()
        self._copied: list[int] = []  # events of the newest state of the copy
        self._copied_token = 0
        self._is_copy_known = True  # else nothing is known of its events, either
        self._rows: dict[int, torch.Tensor] = {0: torch.zeros(NUM_ROWS, 2)}  # by token
        self._number = 0
        self._token = 0
        self._clones: list[Clone] = []
        publications = Publications(folder / "publication", self._draw, self.faults)
        jobs = Jobs(folder / "jobs", self._draw, self.faults)
        self._others = {
            "publish": lambda: self._publish(publications),
            "consume": publications.consume,
            "keep publication": publications.keep,
            "restore": publications.restore,
            "fork publication": lambda: self._fork(publications),
            "start job": jobs.start,
            "move worker": jobs.move_worker,
        }

    def run(self, num_operations: int) -> list[str]:
        """Do so many operations."""
        with objects_of_all(self._objects):
            for _ in range(num_operations):
                name = self._draw.choice(self._operations)
                name = name if self._clones or name in JOBS else "train"
                self.done[name] += 1
                other = self._others.get(name)
                other() if other else getattr(self, "_" + name.replace(" ", "_"))()
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
        is_old = self._clones and self._draw.random() < 0.9
        clone = self._any() if is_old else self._new()
        if (run := self._opened(clone)) is not None:
            self._save(clone, run)
            run.release()

    def _save(self, clone: Clone, run: Run, kind: str = "", of: range | None = None) -> None:
        """Change some rows, differently each time, and save them."""
        token = self._next()
        among = of or self._draw.choice((ALL_ROWS, ALL_ROWS, *ROWS_OF_SHARDS))
        rows = torch.tensor(self._draw.sample(among, 20))
        run.optimizer.zero_grad()
        (0.5 * (run.model(rows) - token) ** 2).sum().backward()
        run.optimizer.step()
        run.checkpointer.step(1)
        run.token = token
        self._rows[token] = run.model.weight.detach().clone()
        clone.tokens.add(token)  # from here on it may be there
        run.save(kind or self._draw.choice(("base", "partial", "partial")))
        clone.events.append(token)
        clone.tokens = {token}

    def _clone(self) -> None:
        origin = self._any()
        clone = self._new()
        shutil.copytree(origin.directory, clone.directory)
        self._inherit(clone, origin)

    def _inherit(self, clone: Clone, origin: Clone) -> None:
        clone.events, clone.tokens = list(origin.events), set(origin.tokens)
        clone.is_known, clone.must_refuse = origin.is_known, origin.must_refuse

    def _cut_off(self) -> None:
        """The process ends at a commit of a save, before or after it is durable."""
        clone = self._any()
        if (run := self._opened(clone)) is None:
            return
        with self._perhaps_cut_off(1.0):
            self._save(clone, run)
        run.release()

    @contextmanager
    def _perhaps_cut_off(self, chance: float = 0.3) -> Iterator[None]:
        """End what is done in the block at a commit, as if its process had died."""
        if self._draw.random() >= chance:
            yield
            return
        with cut_off(self._draw.randrange(4), is_after=self._draw.random() < 0.5):
            with suppress(CprError):
                yield

    def _put_back(self) -> None:
        """Train a store, and put a part of it back from a copy before that.

        Twice: a store that lacks the last commit alone is as one that was cut off.
        """
        clone = self._any()
        if not clone.is_known or (run := self._opened(clone)) is None:
            return
        name = self._draw.choice(PARTS)
        kept = self._folder / "kept part"
        put_part(clone.directory / name, kept)
        self._save(clone, run)
        self._save(clone, run)
        run.release()
        put_part(kept, clone.directory / name)
        clone.must_refuse = name != "MANIFEST.prev"  # which the next commit writes again
        if (run := self._opened(clone)) is not None:
            run.release()

    def _publish(self, publications: Publications) -> None:
        clone = self._any()
        if (run := self._opened(clone)) is None:
            return
        token = run.token
        run.release()
        is_known = clone.is_known and clone.is_exact
        publications.publish(clone.directory, self._rows[token] if is_known else None)

    def _fork(self, publications: Publications) -> None:
        """Publish, put the publication back, and publish something else under the same number."""
        publications.keep()
        for _ in range(2):
            self._train()
            self._publish(publications)
            publications.consume()
            publications.restore()

    def _mix(self) -> None:
        """Put a part of another store in the place of this one's."""
        clone, other = self._any(), self._any()
        name = self._draw.choice(PARTS)
        if clone is other or not (other.directory / name).exists():
            return
        put_part(other.directory / name, clone.directory / name)
        clone.is_known = False
        if (run := self._opened(clone)) is not None:
            run.release()

    def _twins(self) -> None:
        """Train a store and its clone equally far, and swap a part: all numbers are equal."""
        origin = self._any()
        twin = Clone(origin.directory.with_name(f"twin{self._next()}"))
        shutil.copytree(origin.directory, twin.directory)
        self._inherit(twin, origin)
        for each in (origin, twin):
            if (run := self._opened(each)) is None:
                return
            self._save(each, run, "partial")
            run.release()
        name = self._draw.choice(PARTS)
        put_part(twin.directory / name, origin.directory / name)
        origin.is_known = False
        if (run := self._opened(origin)) is not None:
            run.release()

    def _roll_back(self) -> None:
        """Go back to a full-recovery point; where nothing is forgotten, nothing is committed."""
        clone = self._any()
        before = _manifest(clone)
        if (run := self._opened(clone, mode="full")) is not None:
            if _manifest(clone) != before:
                clone.events.append(self._next())
            run.release()

    def _lose(self) -> None:
        """Read the copy into a new directory, which then continues it."""
        if not self._copied:
            return
        clone = self._new()
        clone.events, clone.tokens = list(self._copied), {self._copied_token}
        if (run := self._opened(clone, remote=True)) is None:
            self.faults.append("the copy could not be read into an empty directory")
            return
        self._copy_and_release(clone, run)

    def _lose_twice(self) -> None:
        """A machine takes over the copy, and is cut off before it has added a state of its own.

        It returns after another one has continued the copy, and then may add nothing.
        """
        if not self._copied:
            return
        first = self._take_over(saves=self._draw.random() < 0.5)
        if self._draw.random() < 0.5:
            self._lose()
        else:
            self._copy_of(self._any())
        self._copy_of(first)

    def _take_over(self, *, saves: bool) -> Clone:
        """Read the copy into a new directory, and take it over; then no state can be added."""
        first = self._new()
        first.events, first.tokens = list(self._copied), {self._copied_token}
        self._objects.states_left = 1  # that with which it takes over
        run = self._opened(first, remote=True)
        if run is not None:
            copy = run.checkpointer.store.origin
            assert copy is not None
            if saves:
                self._save(first, run)
            copy.close(30)
            run.release()
        self._objects.states_left = None
        return first

    def _lose_directory(self) -> None:
        """All segments are read from a copy of this very state."""
        clone = self._any()
        if not clone.is_known or clone.must_refuse or self._copied[-1:] != clone.events[-1:]:
            return
        shutil.rmtree(clone.directory / "segments")
        if (run := self._opened(clone, remote=True)) is not None:
            self._copy_and_release(clone, run)

    def _copy(self) -> None:
        self._copy_of(self._any())

    def _copy_of(self, clone: Clone) -> None:
        follows = not self._copied or self._copied[-1] in clone.events
        run = self._opened(clone, remote=True, may_refuse=not (follows and clone.is_known))
        if run is None:
            return
        if clone.is_known and not follows:
            self.faults.append("a store continued a copy that it does not follow from")
        if self._draw.random() < 0.3:
            self._fetch_of(clone, run)
        if self._draw.random() < 0.5:
            self._save(clone, run)
        self._copy_and_release(clone, run)

    def _fetch_of(self, clone: Clone, run: Run) -> None:
        """Read a copy that is being made, as ``cpr fetch`` does.

        Once another state was added, what was read may not continue the copy.
        """
        copy = run.checkpointer.store.origin
        assert copy is not None
        copy.wait(30)
        fetched = self._new()
        fetch_store(self._objects, fetched.directory)
        self._inherit(fetched, clone)

    def _copy_and_release(self, clone: Clone, run: Run) -> None:
        copy = run.checkpointer.store.origin
        assert copy is not None
        # The state of the newest commit is submitted after whoever waits for it is woken.
        run.checkpointer._parts.saver._parts.committer.call(lambda: None).result(30)
        if not copy.wait(30):
            self.faults.append(f"the copy ended: {copy.status()}")
        copy.close(30)
        self._copied, self._copied_token = list(clone.events), run.token
        self._is_copy_known &= clone.is_known
        run.release()

    def _opened(
        self, clone: Clone, *, mode: Any = "partial", remote: bool = False, may_refuse: bool = False
    ) -> Run | None:
        """Recover, after a repair if need be, and compare; None: it is refused for good."""
        copy = RemoteOptions("memory:///") if remote else None
        try:
            return self._recovered(clone, mode, copy)
        except CprError as error:
            text = str(error)
        if "cannot be copied" in text:
            if not may_refuse:
                self.faults.append(f"a store that follows from the copy is refused: {text}")
            return None
        if "no full-recovery point" in text:
            return None
        if clone.is_known and not clone.must_refuse:
            self.faults.append(f"refused: {text}")
        if verify(clone.directory).is_sound:
            self.faults.append(f"it verifies, and is refused: {text}")
        with self._perhaps_cut_off():
            repair(clone.directory, apply=True)
        repaired = repair(clone.directory, apply=True)  # again, if it was cut off
        if not verify(clone.directory).is_sound:
            self._clones = [each for each in self._clones if each is not clone]
            if repaired.is_applied or not repaired.lost:
                self.faults.append("a repaired store does not verify")
            return None
        clone.is_known = clone.must_refuse = False
        try:
            return self._recovered(clone, "partial", copy)
        except CprError as error:
            if "cannot be copied" not in str(error):
                self.faults.append(f"refused after its repair: {error}")
            return None

    def _recovered(self, clone: Clone, mode: Any, remote: RemoteOptions | None) -> Run:
        # Of some points, so that an older manifest may name nothing that is gone.
        store = cpr_ext.StoreOptions(None, cpr_ext.Retention(4), remote=remote)
        run = Run.at(clone.directory, state={"token": lambda: run.token}, store=store)
        try:
            report = run.checkpointer.recover(mode=mode)
        except BaseException:
            if (copy := run.checkpointer.store.origin) is not None:
                copy.wait(30)
                self._claim(clone)
                self._copied, self._copied_token = list(clone.events), max(clone.tokens)
                self._is_copy_known &= clone.is_known
                copy.close(30)
            run.release()
            raise
        run.token = report.state.get("token", 0)
        if clone.must_refuse:
            if not report.damaged_segments:
                self.faults.append("a part was put back, and nothing says so")
            clone.is_known = clone.must_refuse = False
        if clone.is_known:
            if mode == "partial" and run.token not in clone.tokens:
                self.faults.append(f"state {run.token} of {clone.tokens} was recovered")
            if len(clone.tokens) > 1 and run.token not in clone.events:
                clone.events.append(run.token)  # it was there, though not acknowledged
        if remote is not None:
            self._claim(clone)
        clone.tokens = {run.token}
        clone.is_exact = report.rows_stale == 0
        if run.token:
            wrong = int((run.model.weight.detach() != self._rows[run.token]).any(1).sum())
            is_claimed = report.rows_stale is not None and report.rows_stale < wrong
            if wrong and (is_claimed or mode == "full"):
                self.faults.append(f"{wrong} rows are not those of the save, and nothing says so")
        return run

    def _claim(self, clone: Clone) -> None:
        """Note the commit that a store makes when it begins to be copied, as no other store has."""
        clone.events.append(self._next())


def _manifest(clone: Clone) -> bytes:
    path = clone.directory / "MANIFEST.json"
    return path.read_bytes() if path.exists() else b""


def try_history(seed: int, num_operations: int) -> tuple[list[str], Counter[str]]:
    """Return what was wrong in a history, and what was done in it."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as temporary:
        history = History(Path(temporary), seed)
        return history.run(num_operations), history.done


def main() -> int:
    """Make random histories; 1: something was wrong in one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--operations", type=int, default=14)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started, num_faulty, done = time.monotonic(), 0, Counter[str]()
    seeds = range(options.seed, options.seed + options.histories)
    with ProcessPoolExecutor(options.jobs) as pool:
        tried = pool.map(try_history, seeds, [options.operations] * len(seeds), chunksize=20)
        for seed, (faults, counted) in zip(seeds, tried, strict=True):
            for fault in faults:
                print(f"history {seed}: {fault}", flush=True)
            num_faulty += bool(faults)
            done += counted
    seconds = time.monotonic() - started
    print(f"{options.histories} histories, {num_faulty} wrong, {dict(done)}; {seconds:.0f} s")
    return 1 if num_faulty else 0


if __name__ == "__main__":
    sys.exit(main())
