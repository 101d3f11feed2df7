"""What checkpointing did and cost a run, and what failures lost of it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from cpr_ext.metrics.cost_meter import CostMeter
from cpr_ext.metrics.counters import Metrics, MetricsWriter, ScalarWriter
from cpr_ext.schedules.intervals import Schedule


class RunState:
    """The position of a run, its metrics and costs, and the samples that its shards lost.

    Attributes:
        step: training steps done, including those before a restart.
        num_samples: samples trained, likewise.
        metrics: what users read.
        schedule: observes costs when they change; another may replace it.

    Args:
        meter: measures costs.
        writer: is given the metrics then.
    """

    def __init__(
        self, meter: CostMeter, schedule: Schedule, num_shards: int, writer: ScalarWriter | None
    ) -> None:
        self.step = 0
        self.num_samples = 0
        self.metrics = Metrics()
        self._meter = meter
        self.schedule = schedule
        self._num_shards = num_shards
        self._writer = MetricsWriter(writer)
        # By shard: samples trained when it was last saved, or when their loss was last noted.
        self._saved_samples = [0] * num_shards
        schedule.observe(meter.costs())

    def resume_at(self, step: int, num_samples: int) -> None:
        """Set the position of training."""
        self.step, self.num_samples = step, num_samples

    def note_step(
        self, num_samples: int, stall_seconds: float, *, is_saving: bool, row_updates: int
    ) -> None:
        """Record a training step that checkpointing blocked for ``stall_seconds``."""
        metrics = self.metrics
        metrics.stall_seconds += stall_seconds
        if stall_seconds > metrics.max_stall_seconds:
            metrics.max_stall_seconds = stall_seconds
        metrics.row_updates = row_updates
        self._meter.note_step(num_samples, stall_seconds, is_saving=is_saving)
        if metrics.samples_lost:
            self._spread_lost_samples()
        if self._meter.has_news:
            self.publish()

    def note_committed(
        self, step: int, num_samples: int, file_bytes: int, *, is_base: bool
    ) -> None:
        """Record a durable snapshot of the position ``step``, ``num_samples``."""
        self.metrics.snapshot_step, self.metrics.snapshot_time = step, time.time()
        self._saved_samples = [num_samples] * self._num_shards
        self.metrics.bytes_written += file_bytes
        if is_base:
            self.metrics.base_snapshots += 1
        else:
            self.metrics.partial_snapshots += 1
        self._meter.note_snapshot(file_bytes, is_base=is_base)

    def note_failed(self, error: BaseException) -> None:
        """Record a failed snapshot."""
        self.metrics.failed_snapshots += 1
        self.metrics.failures.append(str(error))
        self._meter.note_failed_snapshot()

    def note_lost_samples(self, num_samples: int) -> None:
        """Record samples whose effect rows lost, counted once per shard."""
        self.metrics.samples_lost += num_samples
        self._spread_lost_samples()

    def note_shards_recovered(self, shards: Iterable[int], row_updates_lost: int | None) -> int:
        """Record that shards of the live model were restored.

        Returns:
            samples trained since each shard's last snapshot, summed: what that lost.
        """
        samples_lost = 0
        for shard in shards:
            samples_lost += self.num_samples - self._saved_samples[shard]
            # What was trained until now is lost once; a later failure must not count it again.
            self._saved_samples[shard] = self.num_samples
        self.note_lost_samples(samples_lost)
        if row_updates_lost is None or self.metrics.row_updates_lost is None:
            self.metrics.row_updates_lost = None
        else:
            self.metrics.row_updates_lost += row_updates_lost
        return samples_lost

    def note_damage(self, num_rows: int, samples_lost: int) -> None:
        """Record that damage of the store made rows older, or took them."""
        self.metrics.rows_damaged += num_rows
        self.metrics.row_updates_lost = None
        self.note_lost_samples(samples_lost)

    def note_all_recovered(self, step: int, num_samples: int, samples_lost: int) -> None:
        """Record that everything was restored: training resumes from this position.

        Args:
            samples_lost: samples that failures had taken until that position.
        """
        self.resume_at(step, num_samples)
        self.metrics.samples_lost = samples_lost
        self._spread_lost_samples()
        self._saved_samples = [num_samples] * self._num_shards

    def note_recovery(self, seconds: float, bytes_read: int, *, of_shards: bool) -> None:
        """Record how long a recovery took and what it read."""
        self._meter.note_recovery(seconds, bytes_read, of_shards=of_shards)
        self.publish()

    def publish(self) -> None:
        """Give the schedule the costs, and the writer the metrics."""
        self.schedule.observe(self._meter.costs())
        self._writer.write(self.metrics, self.step)

    def _spread_lost_samples(self) -> None:
        total_samples = max(self.schedule.job_samples() or 0, self.num_samples, 1)
        self.metrics.portion_of_lost_samples = self.metrics.samples_lost / (
            total_samples * self._num_shards
        )
