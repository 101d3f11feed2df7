"""The last save of a worker. After the last step, a worker waits for space on a full disk.

Its peers wait meanwhile; what they saved stays.
"""

from __future__ import annotations

import time

from cpr_ext.checkpointer.checkpointer import Checkpointer
from cpr_ext.errors import SnapshotError, StorageError, StoreError, UsageError
from cpr_ext.runtime.log_text import logger_of

logger = logger_of("jobs")

_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 5.0)  # between attempts; the last one repeats


def save_trained(checkpointer: Checkpointer, rank: int, *, retry_seconds: float) -> None:
    """Save the trained model of a worker, all of it.

    Args:
        retry_seconds: for so long a store that cannot be written is tried again; less than the
            peers wait.

    Raises:
        SnapshotError, StorageError: it could not be saved.
    """
    deadline, attempts = time.monotonic() + retry_seconds, 0
    while True:
        try:
            checkpointer.save("base")
            checkpointer.wait()
            return
        except (SnapshotError, StorageError) as error:
            if not _is_refused_by_system(error) or time.monotonic() >= deadline:
                raise
            logger.warning(
                "worker %d cannot save the trained model: %s; its peers wait, trying again",
                *(rank, error.__cause__ or error),
            )
        pause = _PAUSES_SECONDS[min(attempts, len(_PAUSES_SECONDS) - 1)]
        attempts += 1
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))


def save_for_successor(checkpointer: Checkpointer, rank: int) -> None:
    """Save all rows of a worker that leaves, once; log it if that fails."""
    try:
        checkpointer.save("base")
        checkpointer.wait()
    except (SnapshotError, StorageError, StoreError, UsageError) as error:
        logger.warning(
            "worker %d leaves without a snapshot of step %d: %s",
            *(rank, checkpointer.step_count, error.__cause__ or error),
        )
    else:
        logger.info("worker %d leaves after step %d", rank, checkpointer.step_count)


def close_saved(checkpointer: Checkpointer) -> None:
    """Close the Checkpointer of a trained model that was saved: earlier failures are history."""
    try:
        checkpointer.close()
    except SnapshotError as error:
        logger.warning("the trained model was saved; before that, %s", error)


def _is_refused_by_system(error: BaseException | None) -> bool:
    """Return whether an OSError is at the bottom of it: a full disk, a lost mount, an I/O error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return True
        error = error.__cause__
    return False
