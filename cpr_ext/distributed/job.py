"""The job of a worker, and the events that it reports."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from cpr_ext.checkpointer.checkpointer import Checkpointer
from cpr_ext.distributed.collective.process_group import ReformableGroup
from cpr_ext.distributed.collective.recovery_decision import Choice
from cpr_ext.errors import CprError, SnapshotError, StorageError, StoreError, UsageError
from cpr_ext.runtime.log_text import logger_of

logger = logger_of("jobs")


@dataclass(frozen=True)
class Event:
    """Something happened in a worker's life.

    Attributes:
        kind: ``joined`` (all workers are there), ``recovered`` (all have what they need),
            ``step`` (one was trained), ``peer_lost``, ``finished``.
        step: training steps completed.
        unix_seconds: when.
    """

    kind: Literal["joined", "recovered", "step", "peer_lost", "finished"]
    step: int
    unix_seconds: float


@dataclass(frozen=True)
class Recovery:
    """What the workers did when they had met.

    Attributes:
        recovery: ``"partial"``, ``"full"`` or ``"exact"``, see :class:`Worker`.
        step: training resumed after this one.
        lost: the workers whose state was gone; at the start of a job, all.
        source: the worker whose dense part and position all took.
        samples_lost: by rank, samples of which its rows lost the effect.
        bytes_read: by rank, from its store.
        rows_restored: by rank, from its store, or with parity from its peers.
        load_seconds: by rank, what reading or rebuilding took.
        obstacle: why a job with parity took the store in place of it, or was not exact.
        steps_repeated: completed steps that are trained again, as all went back.
    """

    recovery: Choice
    step: int
    lost: tuple[int, ...]
    source: int
    samples_lost: tuple[int, ...]
    bytes_read: tuple[int, ...]
    rows_restored: tuple[int, ...]
    load_seconds: tuple[float, ...]
    obstacle: str = ""
    steps_repeated: int = 0

    @property
    def without_rows(self) -> tuple[int, ...]:
        """Lost workers whose rows start from nothing: no store and no peer had any."""
        if self.step == 0:
            return ()
        return tuple(
            rank for rank in self.lost if not (self.bytes_read[rank] or self.rows_restored[rank])
        )

    def log(self, rank: int) -> None:
        """Write a line of it, as a warning if anything was lost, or not restored as was asked."""
        if self.step == 0 and not any((*self.bytes_read, *self.rows_restored, *self.samples_lost)):
            logger.info("worker %d begins at step 0", rank)
            return
        without, repeated = list(self.without_rows), self.steps_repeated
        is_loss = any(self.samples_lost) or bool(self.obstacle or without)
        logger.log(
            logging.WARNING if is_loss else logging.INFO,
            "worker %d resumes after step %d (%s recovery, lost workers: %s, %d samples lost%s)%s",
            *(rank, self.step, self.recovery, list(self.lost), sum(self.samples_lost)),
            (f", rows of workers {without} start from nothing" if without else "")
            + (f", {repeated} steps are trained again" if repeated else ""),
            f": {self.obstacle}" if self.obstacle else "",
        )


@dataclass
class Job:
    """What a training step works with.

    Attributes:
        model, optimizers: what ``build`` made; ``optimizers`` as it returned them.
        group: the process group, the default one of ``torch.distributed``.
        checkpointer: of this worker's shards.
        num_samples: in the step that is tried, of the whole batch; None: 1.
        state: what the callables of ``Checkpointer(state=...)`` returned, of the worker whose
            position was taken at the last recovery.
    """

    model: nn.Module
    optimizers: Any
    group: ReformableGroup
    checkpointer: Checkpointer
    state: dict[str, Any] = field(default_factory=dict)
    num_samples: int | None = None

    @property
    def rank(self) -> int:
        """This worker."""
        return self.group.rank()

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return self.group.size()

    @property
    def step(self) -> int:
        """Training steps completed, those before a restart counted in."""
        return self.checkpointer.step_count

    def release(self) -> None:
        """Give the store back as it is, without capturing anything more, and forget the model."""
        self.checkpointer.__exit__(CprError, None, None)
        self.model, self.optimizers = nn.Module(), []


_PAUSE_SECONDS = 2.0  # between attempts to save


def save_trained(checkpointer: Checkpointer, rank: int, *, retry_seconds: float) -> None:
    """Save the trained model of a worker, all of it.

    Args:
        retry_seconds: for so long a store that cannot be written is tried again; less than the
            peers wait.

    Raises:
        SnapshotError, StorageError: it could not be saved.
    """
    deadline = time.monotonic() + retry_seconds
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
        time.sleep(max(0.0, min(_PAUSE_SECONDS, deadline - time.monotonic())))


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
