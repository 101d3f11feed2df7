"""The save after the last step: later there is none, so a worker waits for space on a full disk.

A worker that cannot write its store retries, and then saves the trained model to another directory,
if one was named. Its peers wait meanwhile; what they saved stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cpr_ext.checkpointer.checkpointer import Checkpointer
from cpr_ext.distributed.identity.worker_identity import Identity, show_alive, worker_directory
from cpr_ext.distributed.job import Job
from cpr_ext.errors import SnapshotError, StorageError, StoreError
from cpr_ext.runtime.log_text import logger_of

logger = logger_of("jobs")

_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 5.0)  # between attempts; the last one repeats


@dataclass(frozen=True)
class LastSave:
    """How one worker saves the trained model.

    Args:
        identity: the worker.
        retry_seconds: for so long a store that cannot be written is tried again; less than the
            peers wait.
        elsewhere: directory to save to after that; None: none.
    """

    identity: Identity
    retry_seconds: float
    elsewhere: Path | None = None

    def save(self, job: Job, make: Callable[[Path], Checkpointer]) -> None:
        """Save the trained model, all of it, in the worker's store or elsewhere.

        Args:
            make: makes the Checkpointer of another directory for the job's model.

        Raises:
            SnapshotError, StorageError: it could be saved nowhere.
        """
        deadline, attempts = time.monotonic() + self.retry_seconds, 0
        while True:
            try:
                _save_base(job.checkpointer)
                return
            except (SnapshotError, StorageError) as error:
                if not _is_refused_by_system(error):
                    raise
                if time.monotonic() >= deadline:
                    if self.elsewhere is None:
                        raise
                    self._save_elsewhere(job, make, self.elsewhere, error)
                    return
                logger.warning(
                    "worker %d cannot save the trained model: %s; its peers wait, trying again",
                    *(self.identity.rank, error.__cause__ or error),
                )
            pause = _PAUSES_SECONDS[min(attempts, len(_PAUSES_SECONDS) - 1)]
            attempts += 1
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            show_alive()

    def refuse_forgotten(self, store: Path) -> None:
        """Raise StoreError if an earlier run saved this worker's trained model elsewhere."""
        if self.elsewhere is None:
            return
        found = self._place(self.elsewhere, "step-*")
        own = worker_directory(store, self.identity.rank, self.identity.world_size)
        for place in sorted(found.parent.parent.glob(f"step-*/{found.name}")):
            raise StoreError(
                f"an earlier run saved the trained model of worker {self.identity.rank} to "
                f"'{place}', as its store could not be written: move that directory to '{own}' in "
                "place of what is there, or remove it to continue from the older store"
            )

    def _save_elsewhere(
        self, job: Job, make: Callable[[Path], Checkpointer], elsewhere: Path, error: Exception
    ) -> None:
        place = self._place(elsewhere, f"step-{job.step:012d}")
        other = make(place)
        try:
            other.load_replicated_state(job.checkpointer.replicated_state(), generators=False)
            _save_base(other)
        finally:
            other.__exit__(StorageError, None, None)
        logger.warning(
            "worker %d could not save the trained model in its store (%s) and saved it to '%s': "
            "move that directory in place of the store",
            *(self.identity.rank, error.__cause__ or error, place),
        )

    def _place(self, elsewhere: Path, step: str) -> Path:
        return worker_directory(elsewhere / step, self.identity.rank, self.identity.world_size)


def close_saved(checkpointer: Checkpointer) -> None:
    """Close the Checkpointer of a trained model that was saved: earlier failures are history."""
    try:
        checkpointer.close()
    except SnapshotError as error:
        logger.warning("the trained model was saved; before that, %s", error)


def _save_base(checkpointer: Checkpointer) -> None:
    checkpointer.save("base")
    checkpointer.wait()


def _is_refused_by_system(error: BaseException | None) -> bool:
    """Return whether an OSError is at the bottom of it: a full disk, a lost mount, an I/O error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return True
        error = error.__cause__
    return False
