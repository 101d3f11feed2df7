"""When to take a snapshot. Schedules are combined with ``|``: due as soon as one of them is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from cpr_ext.errors import UsageError


@dataclass(frozen=True)
class Progress:
    """What a schedule decides on, counted from the start of the last snapshot (or of the run)."""

    steps: int
    seconds: float


@dataclass(frozen=True)
class RunCosts:
    """What a run costs, measured so far; None: not known yet.

    Attributes:
        num_shards: row ranges that are lost and recovered on their own.
        fraction: share of the large tables' rows that a partial snapshot saves.
        prioritized_bytes, other_bytes: rows of the large tables; all else that a base holds.
        samples_per_hour: training speed, everything included.
        save_hours: how long saving every row once holds training.
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
    """Decides, after each training step, whether a snapshot is due."""

    @abstractmethod
    def is_due(self, since_last: Progress) -> bool:
        """True if a snapshot should start now."""

    def observe(self, costs: RunCosts) -> None:  # noqa: B027
        """Take note of what the run costs; called at its start and whenever more is known."""

    def job_samples(self) -> int | None:
        """Samples of the whole job, if the schedule was told."""
        return None

    def __or__(self, other: Schedule) -> Schedule:
        """Due as soon as either is."""
        return AnyOf((self, other))


@dataclass(frozen=True)
class EverySteps(Schedule):
    """A snapshot every ``steps`` training steps."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"EverySteps({self.steps}): the interval must be at least 1 step")

    def is_due(self, since_last: Progress) -> bool:  # noqa: D102
        return since_last.steps >= self.steps


@dataclass(frozen=True)
class EverySeconds(Schedule):
    """A snapshot every ``seconds`` seconds of wall-clock time."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"EverySeconds({self.seconds}): the interval must be positive")

    def is_due(self, since_last: Progress) -> bool:  # noqa: D102
        return since_last.seconds >= self.seconds


@dataclass(frozen=True)
class AnyOf(Schedule):
    """Due as soon as one of ``schedules`` is; ``a | b`` makes one."""

    schedules: tuple[Schedule, ...]

    def is_due(self, since_last: Progress) -> bool:  # noqa: D102
        return any(schedule.is_due(since_last) for schedule in self.schedules)

    def observe(self, costs: RunCosts) -> None:  # noqa: D102
        for schedule in self.schedules:
            schedule.observe(costs)

    def job_samples(self) -> int | None:  # noqa: D102
        known = (schedule.job_samples() for schedule in self.schedules)
        return next((samples for samples in known if samples is not None), None)
