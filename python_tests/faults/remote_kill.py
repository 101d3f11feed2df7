"""Processes that are really killed in a request of the copy, and what another machine then finds.

python -m python_tests.faults.remote_kill                    at every request, before and after it
python -m python_tests.faults.remote_kill --sample 20 --seed 3

Object storage is a directory. This process only forks, so it never starts a thread.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpr_ext.wings.remote import RemoteOptions, open_objects
from python_tests.faults import forks
from python_tests.faults.campaign import Campaign, parser_of
from python_tests.faults.remote_objects import KILLS, WatchedObjects
from python_tests.faults.remote_scenario import Job, live, served_by
from python_tests.faults.remote_test import Try, name_of

_TIMEOUT_SECONDS = 300.0
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
    folder.mkdir()
    ended = in_child(lambda: run_until_killed(folder, fault, at))
    if not ended.error:
        return []  # the run ended before
    if not ended.signal:
        return [f"the run failed: {ended.error}"]
    ended = in_child(lambda: go_on(folder, states))
    return [f"another machine cannot go on: {ended.error}"] if ended.error else ended.result


def in_child(action: Callable[[], Any]) -> forks.Ended:
    with tempfile.TemporaryDirectory(prefix="cpr-child-") as place:
        return forks.call(action, Path(place) / "told", _TIMEOUT_SECONDS)


def main() -> int:
    """0 if nothing was found wrong, else 1."""
    options = parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="cpr-remote-") as root:
        whole = in_child(lambda: run_whole(Path(root) / "whole"))
        assert not whole.error, f"a run without a fault failed: {whole.error}"
        states, num_requests = whole.result
        tries = [(fault, at) for fault in KILLS for at in range(num_requests)]
        if options.sample:
            tries = random.Random(options.seed).sample(tries, options.sample)
        campaign = Campaign("remote_kill", options, lambda name: name.rpartition(" ")[0])

        def told_of(tried: Try) -> tuple[str, dict[str, Any]]:
            folder = Path(root) / name_of(tried)
            return name_of(tried), {"found": try_kill(folder, *tried, states)}

        return campaign.run(map(told_of, campaign.left(tries, name_of)))


if __name__ == "__main__":
    sys.exit(main())
