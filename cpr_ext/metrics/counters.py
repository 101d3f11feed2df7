"""Counts and costs of checkpointing so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from cpr_ext.metrics.parity_metrics import ParityMetrics


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
            it was last saved. None: not counted (``MostFrequentlyUsed`` does), or not known.
        checks: how often rows that count as unchanged were compared with hashes of what was
            saved, to the end and without a difference.
        read_backs_failed: snapshots that were damaged when they were read back from disk.
        complete_step: of the newest full-recovery point; 0: none is.
        common_step: of the newest that all workers of a job have; None: not known.
        rows_damaged: rows that recoveries found older than saved, or without a state, as the store
            was damaged.
        rows_changed_unseen: rows that such a check found to differ, one of each table at a time.
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
    checks: int = 0
    rows_changed_unseen: int = 0
    read_backs_failed: int = 0
    complete_step: int = 0
    common_step: int | None = None
    rows_damaged: int = 0
    remote_lag_seconds: float = 0.0
    remote_lag_bytes: int = 0
    failures: list[str] = field(default_factory=list)
    parity: ParityMetrics | None = None

    @property
    def share_of_row_updates_lost(self) -> float | None:
        """``row_updates_lost / row_updates``; None if it is not counted."""
        if self.row_updates_lost is None:
            return None
        return self.row_updates_lost / self.row_updates if self.row_updates else 0.0

    def note_remote_lag(self, seconds: float, lag_bytes: int) -> None:
        """Take note of how far the copy of the store is."""
        self.remote_lag_seconds, self.remote_lag_bytes = seconds, lag_bytes
