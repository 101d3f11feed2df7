"""How a job protects itself: what it saves, how often, and how it recovers from a failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cpr_ext import (
    AllRows,
    LargestChange,
    MostFrequentlyUsed,
    Priority,
    SubSampledUsed,
)
from cpr_ext.errors import UsageError

EmulatedStrategyName = Literal[
    "no-failure", "full", "partial", "cpr-vanilla", "cpr-scar", "cpr-mfu", "cpr-ssu", "parity"
]
#: In the order of the tables and pictures.
STRATEGIES: dict[EmulatedStrategyName, str] = {
    "no-failure": "no failure",
    "full": "full recovery",
    "partial": "partial recovery",
    "cpr-vanilla": "CPR-vanilla",
    "cpr-scar": "CPR-SCAR",
    "cpr-mfu": "CPR-MFU",
    "cpr-ssu": "CPR-SSU",
    "parity": "parity",
}
#: The strategies that save the rows of highest priority first, a fraction at a time.
PRIORITIZED: tuple[EmulatedStrategyName, ...] = ("cpr-scar", "cpr-mfu", "cpr-ssu")


@dataclass(frozen=True)
class EmulatedStrategy:
    """One strategy with its interval in a scenario.

    Attributes:
        name: see :data:`STRATEGIES`.
        interval_hours: T_save, in which the bytes of one save of all rows are written; infinite if
            nothing is saved.
        fraction: share of the rows that one save writes, r; a save starts every ``fraction *
            interval_hours``.
    """

    name: EmulatedStrategyName
    interval_hours: float
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if not self.interval_hours > 0:
            raise UsageError(f"{self.name}: the interval is {self.interval_hours} hours")
        if not 0 < self.fraction <= 1:
            raise UsageError(f"{self.name}: fraction is {self.fraction}; allowed: above 0 to 1")

    @property
    def label(self) -> str:
        """As people call it."""
        return STRATEGIES[self.name]

    @property
    def save_every_hours(self) -> float:
        """Hours from the start of one save to that of the next."""
        return self.fraction * self.interval_hours

    @property
    def recovery(self) -> Literal["full", "partial", "exact", "none"]:
        """How lost shards are recovered; ``none``: there are no failures."""
        if self.name == "no-failure":
            return "none"
        if self.name == "parity":
            return "exact"
        return "full" if self.name == "full" else "partial"

    def priority(self, seed: int) -> Priority | None:
        """Return the priority of its snapshots, or None; ``seed`` is of SSU's sampling."""
        match self.name:
            case "no-failure":
                return None
            case "cpr-scar":
                return LargestChange(self.fraction)
            case "cpr-mfu":
                return MostFrequentlyUsed(self.fraction)
            case "cpr-ssu":
                return SubSampledUsed(self.fraction, seed=seed)
        return AllRows()
