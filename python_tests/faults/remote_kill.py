"""Processes that are really killed in a request of the copy, and what another machine then finds.

python -m python_tests.faults.remote_kill                    at every request, before and after it
python -m python_tests.faults.remote_kill --sample 20 --seed 3

Object storage is a directory. This process only forks, so it never starts a thread.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cpr_ext.wings.remote import RemoteOptions, open_objects
from python_tests.faults.remote_objects import KILLS, WatchedObjects
from python_tests.faults.remote_scenario import Job, live, served_by

NOTES = "notes"  # what was acknowledged: (state, step)


class DeadlyObjects(WatchedObjects):
    """Kills this process where the other one only raises; notes what is acknowledged."""

    notes = Path()

    def _end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def acknowledge(self, commit: str, step: int) -> None:
        super().acknowledge(commit, step)
        temporary = self.notes.with_suffix(".new")
        temporary.write_bytes(pickle.dumps((commit, step)))
        temporary.replace(self.notes)


def objects_in(folder: Path, fault: str = "", at: int = -1) -> DeadlyObjects:
    """Return object storage in a directory."""
    found = DeadlyObjects(open_objects(RemoteOptions(f"file://{folder}/remote")), fault, at)
    found.notes = folder / NOTES
    return found


def in_child(action: Callable[[], Any]) -> tuple[int, Any]:
    """Do it in a child; return its status, and what it returned unless it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(action(), pipe)
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    status = os.waitpid(child, 0)[1]
    return status, pickle.loads(data) if data and status == 0 else None


def run_whole(folder: Path) -> tuple[dict[int, Any], int]:
    """Return the rows by step of a run that is not killed, and its number of requests."""
    objects = objects_in(folder)
    with served_by(objects):
        job = Job(objects, folder)
        live(job)
    assert not job.problems, job.problems
    assert not objects.violations, objects.violations
    return job.states, objects.count


def run_until_killed(folder: Path, fault: str, at: int) -> None:
    """Live until the fault; the process does not return from it."""
    objects = objects_in(folder, fault, at)
    with served_by(objects):
        live(Job(objects, folder))


def go_on(folder: Path, states: dict[int, Any]) -> list[str]:
    """Return what another machine finds wrong, which has the copy alone."""
    objects = objects_in(folder)
    objects.states = None
    if objects.notes.exists():
        objects.acknowledged, objects.acknowledged_step = pickle.loads(objects.notes.read_bytes())
    with served_by(objects):
        job = Job(objects, folder / "another")
        job.states = states
        job.save()
        job.close()
    return [*objects.violations, *job.problems]


def try_kill(folder: Path, fault: str, at: int, states: dict[int, Any]) -> list[str]:
    """Return what was found wrong."""
    status, _ = in_child(lambda: run_until_killed(folder, fault, at))
    if status == 0:
        return []  # the run ended before
    if not os.WIFSIGNALED(status):
        return ["the run failed"]
    status, found = in_child(lambda: go_on(folder, states))
    return ["another machine cannot go on"] if status else list(found)


def main() -> int:
    """0 if nothing was found wrong, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sample", type=int, help="so many tries, drawn, instead of all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cpr-remote-") as root:
        status, whole = in_child(lambda: run_whole(Path(root) / "whole"))
        assert status == 0, "a run without a fault failed"
        states, num_requests = whole
        tries = [(fault, at) for fault in KILLS for at in range(num_requests)]
        if options.sample:
            tries = random.Random(options.seed).sample(tries, options.sample)
        failed = 0
        for number, (fault, at) in enumerate(tqdm(tries, unit=" tries", disable=None)):
            if found := try_kill(Path(root) / str(number), fault, at, states):
                failed += 1
                print("\n    ".join([f"VIOLATION '{fault}' {at}", *found]))
    print(f"{num_requests} requests, {len(tries)} kills, {failed} violations")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
