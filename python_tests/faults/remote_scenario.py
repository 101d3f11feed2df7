"""The training run whose copy in object storage meets faults, machine by machine.

Snapshots, retention and a roll-back on one machine; its process dies and starts again;
the machine is lost, and another one recovers from the copy alone; the lost one returns.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cpr_ext
from cpr_ext.storage.manifest import Manifest
from cpr_ext.wings.remote import RemoteOptions, range_reading, remote_copy
from cpr_ext.wings.remote.remote_copy import RemoteCopy
from cpr_ext.wings.remote.remote_state import newest_state
from python_tests.faults.remote_objects import Killed, WatchedObjects
from python_tests.helpers import Trained, clone, same_bits

TABLES = {"big": (60, 4), "small": (3, 2)}
_TRIES = 5  # of one who starts a job again that has failed
_TIMEOUT_SECONDS = 30.0


@contextlib.contextmanager
def served_by(objects: WatchedObjects) -> Iterator[None]:
    """All addresses lead to ``objects``, requests are tried again soon, and views are noted."""
    submit = RemoteCopy.on_commit
    hook = threading.excepthook

    def note(self: RemoteCopy, state: Manifest) -> None:
        if objects.states is not None:
            objects.states.append(state)
        submit(self, state)

    def pass_over_kills(arguments: Any) -> None:
        if arguments.exc_type is not Killed:
            hook(arguments)

    with (
        patch("cpr_ext.wings.remote.opening.open_objects", lambda options: objects),
        patch.object(remote_copy, "FIRST_PAUSE_SECONDS", 0.001),
        patch.object(remote_copy, "LONGEST_PAUSE_SECONDS", 0.002),
        patch.object(range_reading, "FIRST_PAUSE_SECONDS", 0.0),
        patch.object(RemoteCopy, "on_commit", note),
        patch.object(threading, "excepthook", pass_over_kills),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logger = logging.getLogger("cpr_ext")
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


class Job:
    """A job that goes on, whatever happens to its process and its machines.

    Attributes:
        states: rows by training step, as they were when saved; training is deterministic.
        problems: what was found wrong.
    """

    def __init__(self, objects: WatchedObjects, folder: Path) -> None:
        self.objects = objects
        self.folder = folder
        self.states: dict[int, Any] = {}
        self.problems: list[str] = []
        self._machine = 0
        self._life: Trained | None = None

    @property
    def directory(self) -> Path:
        """The store of the machine of the job."""
        return self.folder / f"machine{self._machine}"

    @property
    def life(self) -> Trained:
        """The process of the job; begins one if there is none."""
        tries_left = _TRIES
        while self._life is None:
            try:
                self._life = self._begin(self.directory)
            except Killed:
                self.objects.restart()
            except cpr_ext.CprError:
                if not (tries_left := tries_left - 1):
                    raise
        return self._life

    def _begin(self, directory: Path) -> Trained:
        is_new = not directory.exists()
        trained = Trained(
            directory,
            TABLES,
            num_shards=2,
            priority=cpr_ext.AllRows(),
            schedule=cpr_ext.EverySteps(10**9),
            store=cpr_ext.StoreOptions(
                rebase_after=None,
                retention=cpr_ext.Retention(full_recovery_points=2),
                remote=RemoteOptions(
                    "memory:///", wait_at_close_seconds=_TIMEOUT_SECONDS, keep_seconds=0
                ),
            ),
            staging=cpr_ext.StagingOptions(slot_bytes=1 << 14, num_threads=1),
        )
        report = trained.checkpointer.recover()
        promised = self.objects.acknowledged_step
        if is_new and report.step < promised:
            self._blame(f"step {report.step} recovered, {promised} was promised")
        self._compare(trained, report.step)
        return trained

    def _compare(self, trained: Trained, step: int) -> None:
        if step in self.states:
            expected, found = self.states[step], trained.rows()
            for table, arrays in expected.items():
                for name, values in arrays.items():
                    if not same_bits(found[table][name], values):
                        self._blame(f"step {step}: {table}/{name} is not as it was saved")
        elif step > 0:
            self._blame(f"step {step} was never saved")

    def save(self, kind: Any = "partial", *, steps: int = 1) -> None:
        """Train, save, and wait until the state is copied, or the process is killed."""
        life = self.life
        life.train(steps)
        self.states[life.checkpointer.step_count] = clone(life.rows())
        life.checkpointer.save(kind)
        life.checkpointer.wait()
        if not self.wait_for_copy():
            self.die()

    def wait_for_copy(self) -> bool:
        """Wait until the newest state is acknowledged; False: the process was killed."""
        life = self.life
        copy = life.checkpointer.store.origin
        assert copy is not None
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not copy.wait(0.02):
            if self.objects.is_dead:
                return False
            if copy.status().is_fenced or time.monotonic() > deadline:
                self._blame(f"the copy has ended: {copy.status()}")
                return True
        newest = copy._writer.newest
        assert newest is not None
        self.objects.acknowledge(newest.manifest.commit_id, newest.step)
        return True

    def roll_back(self) -> None:
        """Full recovery; newer snapshots are forgotten, there too."""
        self.objects.acknowledge(self.objects.acknowledged, -1)  # it gives up newer steps
        life = self.life
        report = life.checkpointer.recover(mode="full")
        self._compare(life, report.step)
        if not self.wait_for_copy():
            self.die()

    def die(self) -> None:
        """The process ends."""
        if self._life is None:
            return
        copy = self._life.checkpointer.store.origin
        assert copy is not None
        copy.close(_TIMEOUT_SECONDS)
        self._life.die()
        self._life = None
        self.objects.restart()

    def lose_machine(self) -> None:
        """The process ends, and its directory is no more there."""
        self.die()
        self._machine += 1

    def old_machine_returns(self) -> None:
        """Its process opens its store and adds nothing to the copy, which has moved on."""
        while not self.wait_for_copy():  # of a save during which the process was killed
            self.die()
        before = newest_state(self.objects.held)
        assert before is not None
        for _ in range(_TRIES):
            try:
                old = self._begin_old()
            except Killed:
                self.objects.restart()
            except cpr_ext.StoreError as error:
                if "cannot be copied" in str(error):
                    break
            except cpr_ext.CprError:
                pass
            else:
                old.die()
                self._blame("the machine that was lost was not refused")
                break
        after = newest_state(self.objects.held)
        # The machine of the job may add states meanwhile, such as of a proof.
        if after is None or after.writer != before.writer:
            self._blame("the machine that was lost has changed the copy")

    def _begin_old(self) -> Trained:
        states, self.states = self.states, {}
        try:
            return self._begin(self.folder / f"machine{self._machine - 1}")
        finally:
            self.states = states

    def close(self) -> None:
        """The job ends well; the copy has all of it."""
        last = self.life.checkpointer.step_count
        while self._life is not None:
            self._life.checkpointer.close()
            self._life = None
            if self.objects.is_dead:  # killed while it closed
                self.objects.restart()
                self.life.checkpointer.close()
                self._life = None
        state = newest_state(self.objects.held)
        if state is None or state.step != last:
            self._blame(f"the job ended at step {last}, the copy: {state and state.step}")

    def _blame(self, text: str) -> None:
        self.problems.append(text)


def run(objects: WatchedObjects, folder: Path) -> list[str]:
    """Return what was found wrong."""
    with served_by(objects):
        job = Job(objects, folder)
        live(job)
    shutil.rmtree(folder, ignore_errors=True)
    return [*objects.violations, *job.problems]


def live(job: Job) -> None:
    """The life of the job, from its first step to a recovery after its end."""
    job.save()
    job.save()
    job.save("base")
    job.save()
    job.roll_back()
    job.save(steps=2)
    job.die()
    job.save()
    job.lose_machine()
    job.save()
    job.old_machine_returns()
    job.save()
    job.close()
    job.lose_machine()
    assert job.life is not None
    job.die()
