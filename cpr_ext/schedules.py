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


class Schedule(ABC):
    """Decides, after each training step, whether a snapshot is due."""

    @abstractmethod
    def is_due(self, since_last: Progress) -> bool:
        """True if a snapshot should start now."""

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
