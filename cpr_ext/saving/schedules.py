"""When to take a snapshot. Schedules are combined with ``|``: due as soon as one of them is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

from cpr_ext.errors import UsageError
from cpr_ext.runtime.validation import (
    as_number,
    as_whole_number,
    require_one_of,
    require_positive_or_none,
)

WhenBusy = Literal["delay", "wait"]


@dataclass(frozen=True)
class Progress:
    """The input of a schedule, counted from the start of the last snapshot (or of the run).

    Attributes:
        steps, seconds: since then.
        snapshot_bytes: size of the last snapshot that was committed.
    """

    steps: int
    seconds: float
    snapshot_bytes: int = 0


@dataclass(frozen=True)
class RunCosts:
    """The measured costs of a run so far; None: not known yet.

    Attributes:
        num_shards: row ranges that are lost and recovered separately.
        fraction: share of the large tables' rows that a partial snapshot saves.
        prioritized_bytes, other_bytes: rows of the large tables, in float32; all else in a base.
        samples_per_hour: training speed, everything included.
        save_hours: how long saving every row once blocks training.
        load_hours, load_shard_hours: reading all shards, and those of one failure.
    """

    num_shards: int
    fraction: float
    prioritized_bytes: float | None = None
    other_bytes: float = 0.0
    samples_per_hour: float | None = None
    save_hours: float | None = None
    load_hours: float | None = None
    load_shard_hours: float | None = None


class Schedule(ABC):
    """Decides, after each training step, whether a snapshot is due.

    Attributes:
        when_busy: what to do when a snapshot is due before the last one is committed. ``"delay"``
            starts it after that commit, and logs a warning if three in a row begin late. ``"wait"``
            blocks training until then, so that snapshots are taken at the same steps whatever the
            disk's speed.
    """

    when_busy: WhenBusy = "delay"

    def require_sound(self) -> None:
        """Raise UsageError for a ``when_busy`` that there is not."""
        require_one_of("when_busy", self.when_busy, ("delay", "wait"))

    @abstractmethod
    def is_due(self, since_last: Progress) -> bool:
        """Return whether a snapshot should start now."""

    def observe(self, costs: RunCosts) -> None:  # noqa: B027
        """Record the costs of the run; called at its start and whenever more is known."""

    @property
    def follows_disk(self) -> bool:
        """Whether snapshots follow one another as fast as they are written, on purpose."""
        return False

    def job_samples(self) -> int | None:
        """Return the samples of the whole job, if the schedule knows them."""
        return None

    def __or__(self, other: Schedule) -> Schedule:
        """Due as soon as either is."""
        waits = "wait" in (self.when_busy, other.when_busy)
        return AnyOf((self, other), when_busy="wait" if waits else "delay")


@dataclass(frozen=True)
class EverySteps(Schedule):
    """A snapshot every ``steps`` training steps."""

    steps: int
    when_busy: WhenBusy = field(default="delay", kw_only=True)

    def __post_init__(self) -> None:
        self.require_sound()
        object.__setattr__(self, "steps", as_whole_number("EverySteps.steps", self.steps, 1))

    def is_due(self, since_last: Progress) -> bool:  # noqa: D102
        return since_last.steps >= self.steps


@dataclass(frozen=True)
class EverySeconds(Schedule):
    """A snapshot every ``seconds`` seconds of wall-clock time."""

    seconds: float
    when_busy: WhenBusy = field(default="delay", kw_only=True)

    def __post_init__(self) -> None:
        self.require_sound()
        if not as_number("EverySeconds.seconds", self.seconds) > 0:
            raise UsageError(f"EverySeconds({self.seconds}): the interval must be positive")

    def is_due(self, since_last: Progress) -> bool:  # noqa: D102
        return since_last.seconds >= self.seconds


@dataclass(frozen=True)
class Continuous(Schedule):
    """One snapshot after the other: the disk's bandwidth then determines the cost of a failure.

    The next one begins when the last is committed, with ``when_busy="delay"`` (the default).

    Args:
        max_bytes_per_second: write no more than this on average; None: as fast as the disk allows.
        min_seconds: between the starts of two snapshots, so that a failing disk is not tried at
            every step.
    """

    max_bytes_per_second: float | None = None
    min_seconds: float = 1.0
    when_busy: WhenBusy = field(default="delay", kw_only=True)

    def __post_init__(self) -> None:
        self.require_sound()
        require_positive_or_none("max_bytes_per_second", self.max_bytes_per_second)
        if not as_number("min_seconds", self.min_seconds) >= 0:
            raise UsageError(f"min_seconds is {self.min_seconds}; it must not be negative")

    @property
    def follows_disk(self) -> bool:  # noqa: D102
        return True

    def is_due(self, since_last: Progress) -> bool:  # noqa: D102
        rate = self.max_bytes_per_second
        needed = since_last.snapshot_bytes / rate if rate is not None else 0.0
        return since_last.seconds >= max(needed, self.min_seconds)


@dataclass(frozen=True)
class AnyOf(Schedule):
    """Due as soon as one of ``schedules`` is; ``a | b`` makes one, which waits if either does."""

    schedules: tuple[Schedule, ...]
    when_busy: WhenBusy = field(default="delay", kw_only=True)

    def is_due(self, since_last: Progress) -> bool:  # noqa: D102
        return any(schedule.is_due(since_last) for schedule in self.schedules)

    def observe(self, costs: RunCosts) -> None:  # noqa: D102
        for schedule in self.schedules:
            schedule.observe(costs)

    @property
    def follows_disk(self) -> bool:  # noqa: D102
        return any(schedule.follows_disk for schedule in self.schedules)

    def job_samples(self) -> int | None:  # noqa: D102
        known = (schedule.job_samples() for schedule in self.schedules)
        return next((samples for samples in known if samples is not None), None)
