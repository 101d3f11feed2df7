"""The training run that faults happen to: everything that changes a store, once or a few times.

It takes snapshots at fixed steps, so every run makes the same calls.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import cpr_ext
from cpr_ext.errors import SnapshotError
from cpr_ext.saving.snapshot_handle import SnapshotHandle
from cpr_ext.storage.retention import Retention
from python_tests.faults.journal import NOTHING, Journal
from python_tests.faults.model import SLOT_BYTES, State, build, precision, train_step, wreck_shard
from python_tests.helpers import die, open_checkpointer

# A slot holds one chunk; enough of them that none is waited for, so that a capture over steps takes
# a chunk at each.
staging = cpr_ext.StagingOptions(num_slots=8, num_threads=1)

T = TypeVar("T")

# The stores of the scenario, below the watched directory, and their number of shards.
STORES = {"store": 2, "other": 1}
COPY = "copy"  # of the stores, outside: as they were at the first promise after a fault
_TRIES = 40  # more than any fault lasts
_TIMEOUT_SECONDS = 20.0
_PAUSE_SECONDS = 0.02  # in which threads come to do what they were given, so that runs are alike


class Watcher:
    """What the scenario tells of itself: its journal, and a copy after a fault."""

    def __init__(self, root: Path, journal: Journal, state_of_fault: Callable[[], str]) -> None:
        self.root = root
        self.journal = journal
        # By store and snapshot: the state saved, and whether that made a full-recovery point.
        self.captured: dict[tuple[str, int], tuple[int, bool]] = {}
        self._state_of_fault = state_of_fault
        self._is_over = False
        self._is_copied = False

    def insist(self, action: Callable[[], T]) -> T:
        """Do as a user who is told of a failure, and tries again."""
        for _ in range(_TRIES):
            try:
                return action()
            except (cpr_ext.CprError, OSError) as error:
                self.journal.write("reported", type(error).__name__, error)
        raise AssertionError(f"it failed {_TRIES} times")

    def look_for_end(self) -> None:
        """Write down that no call will fail any more."""
        if not self._is_over and self._state_of_fault() == "over":
            self._is_over = True
            self.journal.write("over")

    def copy_after_fault(self) -> None:
        """Keep the stores as they are at the first promise after a fault."""
        if self._is_copied or self._state_of_fault() == "to come":
            return
        self._is_copied = True
        copy = self.journal.directory / COPY
        shutil.copytree(self.root, copy)
        (copy / "num_lines").write_text(str(self.journal.num_lines))


class Life:
    """A model with its Checkpointer, from a start to an end."""

    def __init__(self, watcher: Watcher, name: str, seed: int, **options: Any) -> None:
        self._watcher = watcher
        self._journal = watcher.journal
        self._name = name
        self._saves_all = isinstance(options.get("priority"), cpr_ext.AllRows)
        self.model, self.optimizers = build(seed)
        kept = options.pop("store", cpr_ext.StoreOptions(None))
        self.checkpointer = watcher.insist(
            lambda: open_checkpointer(
                self.model,
                self.optimizers,
                watcher.root / name,
                num_shards=STORES[name],
                state={"seq": self._captured_seq},
                staging=replace(staging, slot_bytes=SLOT_BYTES),
                save_at_close=False,
                store=replace(kept, precision=precision()),
                **options,
            )
        )
        self._seq = NOTHING
        self._last_complete = NOTHING  # acknowledged
        self._begun: SnapshotHandle | None = None

    def _captured_seq(self) -> int:
        """Called when a snapshot is captured: what it is of, and what it may hold."""
        snapshot = self.checkpointer._saver.in_flight
        assert snapshot is not None
        if any(self._seq == seq for seq, _ in self._watcher.captured.values()):
            # Saved twice at a step; each snapshot is to have a state of its own.
            self._seq = self._journal.record(State.of(self.model, self.optimizers))
        first = self._seq - (snapshot.last_step - snapshot.first_step)
        if not self._saves_all and not snapshot.is_candidate:
            first = max(self._last_complete, 0)
        self._watcher.captured[self._name, snapshot.number] = (self._seq, snapshot.is_candidate)
        self._journal.write("captured", self._name, self._seq, first, int(snapshot.is_candidate))
        return self._seq

    def recover(self, **options: Any) -> None:
        """Go back, as the journal tells."""
        report = self._watcher.insist(lambda: self.checkpointer.recover(**options))
        seq = report.state.get("seq", NOTHING)
        self._seq = self._journal.record(State.of(self.model, self.optimizers))
        if "from_store" not in options:
            self._journal.write("resumed", self._name, seq, self._seq)
        self._begun = None

    def go_back_to_point(self) -> None:
        """Full recovery in a live model: newer snapshots are forgotten."""
        numbers = [r.snapshot for r in self.checkpointer.store.manifest.dense if r.is_complete]
        self._journal.write(
            "leaving", self._name, self._watcher.captured[self._name, numbers[-1]][0]
        )
        self.recover(mode="full")

    def lose_shard(self, shard: int) -> None:
        """Recover one shard while the rest goes on."""
        time.sleep(_PAUSE_SECONDS)
        wreck_shard(self.model, self.optimizers, shard, STORES[self._name])
        self._watcher.insist(lambda: self.checkpointer.recover(shards=[shard]))
        self._note(self._begun)
        self._begun = None
        self._seq = self._journal.record(State.of(self.model, self.optimizers))

    def train(self, num_steps: int, *, wait: bool = True) -> None:
        """Train; ``wait`` for each snapshot when its step is done."""
        for _ in range(num_steps):
            self._watcher.look_for_end()
            train_step(self.model, self.optimizers)
            self._seq = self._journal.record(State.of(self.model, self.optimizers))
            if begun := self.checkpointer.step(10):
                self._note(self._begun)  # it is done: when_busy="wait"
                self._begun = begun
            if wait:
                self.acknowledge()

    def save(self, kind: Any) -> None:
        """Take a snapshot at once."""
        snapshot = self.checkpointer.save(kind)
        self._note(self._begun)  # that is done now
        self._begun = snapshot
        self.acknowledge()

    def save_all(self) -> None:
        """Partial snapshots without training, until every row is saved as it is now."""
        for _ in range(_TRIES):
            self.save("partial")
            if self._last_complete == self._seq:
                return
        raise AssertionError("partial snapshots never come to an end")

    def acknowledge(self) -> None:
        """Wait for the snapshot in flight; write down what was promised."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        try:
            is_done = self.checkpointer.wait(_TIMEOUT_SECONDS)
        except cpr_ext.CprError as error:
            self._journal.write("reported", type(error).__name__, error)
        else:
            assert is_done, "wait() did not end"
            self._note(begun)
        self._watcher.copy_after_fault()

    def _note(self, snapshot: SnapshotHandle | None) -> None:
        """Write down that a snapshot is committed, if it is."""
        if snapshot is not None and snapshot.state == "committed":
            seq, is_complete = self._watcher.captured[self._name, snapshot.number]
            if is_complete and snapshot.is_complete:
                self._last_complete = seq
            self._journal.write("acknowledged", self._name, seq, int(snapshot.is_complete))

    def end(self) -> None:
        """As a process that is done, or dies."""
        with contextlib.suppress(SnapshotError):  # of failures reported before
            self.checkpointer.close()

    def die(self) -> None:
        """Leave files, no locks."""
        die(self.checkpointer)


def run(watcher: Watcher) -> None:
    """Three lives of two stores."""

    def report(message: Warning | str, *_: Any, **__: Any) -> None:
        watcher.journal.write("reported", "warning", message)

    warnings.simplefilter("always")
    warnings.showwarning = report
    _grow(watcher)
    _go_on(watcher)
    _move(watcher)
    watcher.journal.write("done")


def _grow(watcher: Watcher) -> None:
    """Base and partial snapshots, retention, a lost shard; then the process dies."""
    life = Life(
        watcher,
        "store",
        seed=1,
        priority=cpr_ext.AllRows(),
        schedule=cpr_ext.EverySteps(2, when_busy="wait"),
        store=cpr_ext.StoreOptions(0.5, Retention(full_recovery_points=2)),
    )
    life.recover()
    life.train(5)
    life.lose_shard(1)
    life.train(2, wait=False)
    life.lose_shard(0)
    life.train(2)
    life.die()


def _go_on(watcher: Watcher) -> None:
    """Captures spread over steps, a base on demand, back to it; ends well."""
    life = Life(
        watcher,
        "store",
        seed=2,
        priority=cpr_ext.AllRows(),
        schedule=cpr_ext.EverySteps(4, when_busy="wait"),
        store=cpr_ext.StoreOptions(None, Retention(full_recovery_points=1)),
    )
    life.recover()
    life.train(6, wait=False)
    life.acknowledge()
    life.save("base")
    life.train(5, wait=False)
    life.lose_shard(1)
    life.train(4, wait=False)
    life.acknowledge()
    life.go_back_to_point()
    life.train(5, wait=False)
    life.acknowledge()
    life.end()


def _move(watcher: Watcher) -> None:
    """Another number of shards in another store; only some of the rows with each snapshot."""
    life = Life(
        watcher,
        "other",
        seed=3,
        priority=cpr_ext.MostFrequentlyUsed(0.5),
        schedule=cpr_ext.EverySteps(2),
    )
    life.recover(from_store=watcher.root / "store")
    life.train(3)
    life.train(2, wait=False)
    life.lose_shard(0)
    life.train(1, wait=False)
    life.save_all()
    life.end()
