"""Counts and costs of checkpointing so far."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class ParityMetrics:
    """What peers hold of a worker's rows, and what sending it costs.

    Attributes:
        protected: any one worker of the parity group could be rebuilt now.
        machines_at_risk: which have several workers of the group, so that it does not survive their
            loss. 0 in a job of loopback addresses.
        completed_step: the newest.
        acknowledged_step: the newest of which the peers have the changes.
        bytes_sent: by this worker, in this round of all workers.
        rebuilt_bytes, bytes_to_rebuild: of this group's rows and parity, decoded or encoded by the
            newest rebuild, and in all.
        rebuilds: rebuilds of the group's rows or parity that were completed.
    """

    protected: bool = False
    machines_at_risk: int = 0
    completed_step: int = 0
    acknowledged_step: int = 0
    bytes_sent: int = 0
    rebuilt_bytes: int = 0
    bytes_to_rebuild: int = 0
    rebuilds: int = 0
    _sending_since: float = 0.0

    @property
    def lag_steps(self) -> int:
        """Completed steps of which the peers do not have the changes yet; 0 while unprotected."""
        return self.completed_step - self.acknowledged_step if self.protected else 0

    @property
    def bytes_per_second(self) -> float:
        """Bytes sent per second, in this round of all workers; 0 while unprotected."""
        if not self.protected:
            return 0.0
        return self.bytes_sent / max(time.perf_counter() - self._sending_since, 1e-9)

    @property
    def rebuild_progress(self) -> float:
        """The share of the newest rebuild that is done, from 0 to 1."""
        return self.rebuilt_bytes / self.bytes_to_rebuild if self.bytes_to_rebuild else 1.0

    def begin_sending(self, step: int) -> None:
        """Count what is sent from now on: the changes after ``step``."""
        self._sending_since, self.bytes_sent = time.perf_counter(), 0
        self.completed_step = self.acknowledged_step = step

    def note_protected(self) -> None:
        """Note that all parity of the group is encoded, and changes are sent."""
        self.protected = True

    def note_unprotected(self) -> None:
        """Note that the group lacks a member, or some of its parity."""
        self.protected = False

    def note_acknowledged(self, step: int, num_bytes: int) -> None:
        """Note that the peers have the changes of ``step``, sent in so many bytes."""
        self.acknowledged_step = step
        self.bytes_sent += num_bytes

    def begin_rebuild(self, num_bytes: int) -> None:
        """Begin to decode or encode so many bytes of rows and parity."""
        self.rebuilt_bytes, self.bytes_to_rebuild = 0, num_bytes

    def note_rebuilt(self, num_bytes: int) -> None:
        """Add bytes that are done."""
        self.rebuilt_bytes += num_bytes

    def end_rebuild(self) -> None:
        """Note that all of them are done."""
        self.rebuilt_bytes = self.bytes_to_rebuild
        self.rebuilds += 1


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
        deaths: of a job's workers whose place another process took, by worker and why: a signal,
            or the class of an error, for example (docs/distributed.md).
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
    deaths: Counter[tuple[int, str]] = field(default_factory=Counter)

    @property
    def share_of_row_updates_lost(self) -> float | None:
        """``row_updates_lost / row_updates``; None if it is not counted."""
        if self.row_updates_lost is None:
            return None
        return self.row_updates_lost / self.row_updates if self.row_updates else 0.0

    def note_remote_lag(self, seconds: float, lag_bytes: int) -> None:
        """Take note of how far the copy of the store is."""
        self.remote_lag_seconds, self.remote_lag_bytes = seconds, lag_bytes
