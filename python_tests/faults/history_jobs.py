"""Jobs of two workers in random histories: workers' directories of two runs are never one job.

A worker is its store and the note next to it. What processes do at their first meeting is done here
by the same functions, without processes.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from cpr_ext.distributed.collective import recovery_decision
from cpr_ext.distributed.identity.run_note import RunNote
from cpr_ext.distributed.identity.worker_identity import Identity
from cpr_ext.errors import WorkersDifferError
from cpr_ext.storage.ids import new_id
from cpr_ext.storage.job_stores import worker_directory

_SIZE = 2
_JOBS = ("a", "b")


class Jobs:
    """Directories of two jobs, and of which run each worker's store is."""

    def __init__(self, folder: Path, draw: random.Random, faults: list[str]) -> None:
        self._folder = folder
        self._draw = draw
        self._faults = faults
        self._runs: dict[Path, str] = {}  # by the store of a worker

    def start(self) -> None:
        """All workers of a job meet."""
        job = self._folder / self._draw.choice(_JOBS)
        job.mkdir(parents=True, exist_ok=True)
        notes = [RunNote(job, Identity(rank, _SIZE, "127.0.0.1", 1)) for rank in range(_SIZE)]
        stores = [worker_directory(job, rank, _SIZE) for rank in range(_SIZE)]
        known = {self._runs[store] for store in stores if store in self._runs}
        try:
            run = recovery_decision.agree_on_run([(note.run, new_id()) for note in notes])
        except WorkersDifferError:
            if len(known) < 2:
                self._faults.append("workers of one run may not train together")
            return
        if len(known) > 1 or (known and run not in known):
            self._faults.append("stores of two runs are one job")
        for note, store in zip(notes, stores, strict=True):
            store.mkdir(exist_ok=True)
            note.write(run, 1)
            self._runs[store] = run

    def move_worker(self) -> None:
        """Put a worker's directory, with its note, in the place of another's; or lose it."""
        places = [worker_directory(self._folder / job, r, _SIZE) for job in _JOBS for r in (0, 1)]
        source, target = self._draw.sample(places, 2)
        _remove(target)
        self._runs.pop(target, None)
        if source in self._runs and self._draw.random() < 0.7:
            shutil.copytree(source, target)
            shutil.copy(_note(source), _note(target))
            self._runs[target] = self._runs[source]


def _note(store: Path) -> Path:
    return store.with_name(f"{store.name}.run")


def _remove(store: Path) -> None:
    shutil.rmtree(store, ignore_errors=True)
    _note(store).unlink(missing_ok=True)
    store.parent.mkdir(parents=True, exist_ok=True)
