"""Counts and costs of checkpointing so far."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Protocol


class ScalarGroup(Protocol):
    """Metrics of a part of the library, with scalars of their own."""

    def write_scalars(self, writer: ScalarWriter, step: int) -> None:
        """Write all of them for ``step``."""


class ScalarWriter(Protocol):
    """A destination of scalars, such as TensorBoard's ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Record a value at a step."""


@dataclass
class Metrics:
    """Counts and costs of checkpointing so far.

    Attributes:
        base_snapshots, partial_snapshots, failed_snapshots: how many.
        snapshot_step: of the newest snapshot of this process that is durable; 0: there is none.
        snapshot_time: when it became durable, in seconds since the epoch.
        bytes_written: of committed segments.
        stall_seconds: total time that ``step()`` blocked training.
        max_stall_seconds: the longest such time.
        samples_lost: samples whose effect failures took from lost shards, summed over the shards;
            of damaged rows their share of a shard.
        portion_of_lost_samples: PLS, ``samples_lost`` as a share of all samples of all shards; of
            the whole job if the schedule knows its length (``TargetPLS(total_samples=...)``), else
            of the samples so far. A shard's loss counts from its last snapshot, a partial one too.
        row_updates: rows of gradients, and lookups of fused tables, in training steps since the
            Checkpointer was constructed; each changed a row.
        row_updates_lost: exactly those that recoveries of shards reverted: for each row, all since
            it was last saved. None: not counted, see ``count_row_updates``, or not known.
        compactions, failed_compactions: merged segments that became live; merges that failed.
        scrub_passes: how often all rows that count as unchanged were compared with hashes of what
            was saved.
        round_trips, round_trips_failed: full-recovery points that were read back from disk as
            captured, and not as captured.
        proven_step: of the newest full-recovery point that is proven; 0: none is.
        rows_damaged: rows that recoveries found older than saved, or without a state, as the store
            was damaged.
        rows_changed_unseen: rows that this found to differ, one of each table at a time.
        remote_lag_seconds, remote_lag_bytes: how long the oldest state that is not in the remote
            store has waited, and what is to be sent of the newest.
        parity: of a worker with parity; None: it has none.
    """

    base_snapshots: int = 0
    partial_snapshots: int = 0
    failed_snapshots: int = 0
    snapshot_step: int = 0
    snapshot_time: float = 0.0
    bytes_written: int = 0
    stall_seconds: float = 0.0
    max_stall_seconds: float = 0.0
    samples_lost: int = 0
    portion_of_lost_samples: float = 0.0
    row_updates: int = 0
    row_updates_lost: int | None = 0
    compactions: int = 0
    failed_compactions: int = 0
    scrub_passes: int = 0
    rows_changed_unseen: int = 0
    round_trips: int = 0
    round_trips_failed: int = 0
    proven_step: int = 0
    rows_damaged: int = 0
    remote_lag_seconds: float = 0.0
    remote_lag_bytes: int = 0
    failures: list[str] = field(default_factory=list)
    parity: ScalarGroup | None = None

    @property
    def share_of_row_updates_lost(self) -> float | None:
        """``row_updates_lost / row_updates``; None if it is not counted."""
        if self.row_updates_lost is None:
            return None
        return self.row_updates_lost / self.row_updates if self.row_updates else 0.0

    def note_remote_lag(self, seconds: float, lag_bytes: int) -> None:
        """Take note of how far the copy of the store is."""
        self.remote_lag_seconds, self.remote_lag_bytes = seconds, lag_bytes

    def write_scalars(self, writer: ScalarWriter, step: int) -> None:
        """Write every number as the scalar ``cpr/<name>`` of ``step``."""
        for name, value in vars(self).items():
            if isinstance(value, int | float):
                writer.add_scalar(f"cpr/{name}", value, step)
        if (share := self.share_of_row_updates_lost) is not None:
            writer.add_scalar("cpr/share_of_row_updates_lost", share, step)
        if self.parity is not None:
            self.parity.write_scalars(writer, step)


class MetricsWriter:
    """Writes metrics to a user's writer, if there is one; an exception of it costs one warning."""

    def __init__(self, writer: ScalarWriter | None) -> None:
        self._writer = writer
        self._has_warned = False

    def write(self, metrics: Metrics, step: int) -> None:
        """Write every number of ``metrics`` for ``step``. A writer that failed is tried again."""
        if self._writer is None:
            return
        try:
            metrics.write_scalars(self._writer, step)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"scalar_writer failed at step {step}; training continues without these "
                    f"values. Later failures are not reported: {error!r}",
                    stacklevel=2,
                )
