"""What checkpointing did and cost a run, and what failures lost of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from cpr_ext.errors import UsageError
from cpr_ext.saving.metrics import Metrics
from cpr_ext.saving.schedules import RunCosts, Schedule
from cpr_ext.state.table import Table

# Steps after which the speed of training is told: the first ones are slower.
_STEPS_FOR_SPEED = 20
_STEPS_WITH_NEWS = (_STEPS_FOR_SPEED, 10 * _STEPS_FOR_SPEED, 100 * _STEPS_FOR_SPEED)


class CostMeter:
    """Adds up what steps, snapshots and recoveries took; :meth:`costs` scales it to whole saves.

    Args:
        prioritized: names of the tables of which a partial snapshot saves a share.
        fraction: that share.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        prioritized: Collection[str],
        fraction: float,
        num_shards: int,
    ) -> None:
        self._tables = tables
        self._prioritized = prioritized
        self._fraction = fraction
        self._num_shards = num_shards
        self._started = time.monotonic()
        self._steps = 0
        self._samples = 0
        self._idle_steps = 0
        self._idle_seconds = 0.0
        self._snapshot_seconds = 0.0  # of the snapshot on its way
        self._save_seconds = 0.0
        self._saved_bytes = 0
        self._base_bytes = 0
        self._prioritized_bytes: int | None = None
        self._load_seconds: float | None = None
        self._load_shard_seconds: float | None = None

    def note_step(self, num_samples: int, stall_seconds: float, *, is_saving: bool) -> None:
        """Record a training step, and how long checkpointing blocked it."""
        if self._steps == 0:
            self._started = time.monotonic()
        else:
            self._samples += num_samples
        self._steps += 1
        if is_saving:
            # Counting lookups takes its time in every step.
            counting = self._idle_seconds / self._idle_steps if self._idle_steps else 0.0
            self._snapshot_seconds += max(0.0, stall_seconds - counting)
        else:
            self._idle_steps += 1
            self._idle_seconds += stall_seconds

    @property
    def has_news(self) -> bool:
        """Whether speed is known since this step, or is known much better than when last asked."""
        return self._steps in _STEPS_WITH_NEWS

    def note_snapshot(self, live_bytes: int, *, is_base: bool) -> None:
        """Record a committed snapshot; ``live_bytes``: of what it holds, as training has it."""
        if self._snapshot_seconds:
            self._save_seconds += self._snapshot_seconds
            self._saved_bytes += live_bytes
        self._snapshot_seconds = 0.0
        if is_base:
            self._base_bytes = live_bytes
            with suppress(UsageError):  # a table that cannot be saved any more
                self._prioritized_bytes = self._measure(self._prioritized)

    def note_failed_snapshot(self) -> None:
        """Record a failed snapshot: its time has no relation to its bytes."""
        self._snapshot_seconds = 0.0

    def note_recovery(self, seconds: float, bytes_read: int, *, of_shards: bool) -> None:
        """Record the time of a recovery, unless it read nothing."""
        if bytes_read == 0:
            return
        if of_shards:
            self._load_shard_seconds = seconds
        else:
            self._load_seconds = seconds
        self._started += seconds  # no time of training

    def costs(self) -> RunCosts:
        """Return the interim result."""
        elapsed_hours = (time.monotonic() - self._started) / 3600
        has_speed = self._steps >= _STEPS_FOR_SPEED and self._samples > 0
        save_seconds = (
            self._save_seconds * self._base_bytes / self._saved_bytes if self._saved_bytes else None
        )
        return RunCosts(
            num_shards=self._num_shards,
            fraction=self._fraction,
            prioritized_bytes=self._prioritized_bytes,
            other_bytes=max(0, self._base_bytes - (self._prioritized_bytes or 0)),
            samples_per_hour=self._samples / elapsed_hours if has_speed else None,
            save_hours=_hours(save_seconds),
            load_hours=_hours(self._load_seconds),
            load_shard_hours=_hours(self._load_shard_seconds),
        )

    def _measure(self, names: Collection[str]) -> int:
        return sum(
            array.nbytes
            for table in self._tables
            if table.name in names
            for array in table.clean_arrays().values()
        )


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 3600


class RunState:
    """The position of a run, its metrics and costs, and the samples that its shards lost.

    Attributes:
        step: training steps done, including those before a restart.
        num_samples: samples trained, likewise.
        metrics: what users read.
        schedule: observes costs when they change; another may replace it.

    Args:
        meter: measures costs.
    """

    def __init__(self, meter: CostMeter, schedule: Schedule, num_shards: int) -> None:
        self.step = 0
        self.num_samples = 0
        self.metrics = Metrics()
        self._meter = meter
        self.schedule = schedule
        self._num_shards = num_shards
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
            self.update_schedule()

    def note_committed(
        self, step: int, num_samples: int, file_bytes: int, live_bytes: int, *, is_base: bool
    ) -> None:
        """Record a durable snapshot of a position; see :meth:`CostMeter.note_snapshot`."""
        self.metrics.snapshot_step, self.metrics.snapshot_time = step, time.time()
        self._saved_samples = [num_samples] * self._num_shards
        self.metrics.bytes_written += file_bytes
        if is_base:
            self.metrics.base_snapshots += 1
        else:
            self.metrics.partial_snapshots += 1
        self._meter.note_snapshot(live_bytes, is_base=is_base)

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
        self.update_schedule()

    def update_schedule(self) -> None:
        """Give the schedule the costs."""
        self.schedule.observe(self._meter.costs())

    def _spread_lost_samples(self) -> None:
        total_samples = max(self.schedule.job_samples() or 0, self.num_samples, 1)
        self.metrics.portion_of_lost_samples = self.metrics.samples_lost / (
            total_samples * self._num_shards
        )
