"""The costs of saving and recovering, measured during the run."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress

from cpr_ext.errors import UsageError
from cpr_ext.schedules.intervals import RunCosts
from cpr_ext.state.table import Table

# Steps after which the speed of training is told: the first ones are slower.
_STEPS_FOR_SPEED = 20


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
        return self._steps in (_STEPS_FOR_SPEED, 10 * _STEPS_FOR_SPEED, 100 * _STEPS_FOR_SPEED)

    def note_snapshot(self, file_bytes: int, *, is_base: bool) -> None:
        """Record a committed snapshot."""
        if self._snapshot_seconds:
            self._save_seconds += self._snapshot_seconds
            self._saved_bytes += file_bytes
        self._snapshot_seconds = 0.0
        if is_base:
            self._base_bytes = file_bytes
            with suppress(UsageError):  # a table that cannot be saved any more
                self._prioritized_bytes = self._measure_prioritized()

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

    def _measure_prioritized(self) -> int:
        return sum(
            array.nbytes
            for table in self._tables
            if table.name in self._prioritized
            for array in table.arrays().values()
        )


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 3600
