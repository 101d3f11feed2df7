"""What a plan is made from: the job, and what saving and recovering cost it, in hours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cpr_ext.errors import UsageError


def require_positive(values: Mapping[str, float]) -> None:
    """Raise UsageError unless each value is a finite number above 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name} is {value}; it must be above 0")


def require_not_negative(values: Mapping[str, float]) -> None:
    """Raise UsageError unless each value is a finite number, at least 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"{name} is {value}; it must not be negative")


def require_share(name: str, value: float) -> None:
    """Raise UsageError unless ``value`` is above 0 and at most 1."""
    if not 0 < value <= 1:
        raise UsageError(f"{name} is {value}; it is a share: above 0, at most 1")


def duration(hours: float) -> str:
    """Return hours as a person reads them: ``44.8 h``, ``17.5 min`` or ``3.1 s``."""
    if hours >= 1:
        return f"{hours:.3g} h" if hours < 1000 else f"{hours:.0f} h"
    return f"{60 * hours:.3g} min" if hours >= 1 / 60 else f"{3600 * hours:.3g} s"


@dataclass(frozen=True)
class JobCosts:
    """Hours that training stops; background work costs none.

    Attributes:
        save_hours: to save every row of every shard once, ``O_save``. Above 0.
        load_hours: to load all shards after a failure, ``O_load``.
        load_shard_hours: to load only the shards lost in one failure, side by side.
        reschedule_hours: to find and start a replacement node, ``O_resched``.
    """

    save_hours: float
    load_hours: float
    load_shard_hours: float
    reschedule_hours: float

    def __post_init__(self) -> None:
        require_positive({"save_hours": self.save_hours})
        require_not_negative(
            {
                "load_hours": self.load_hours,
                "load_shard_hours": self.load_shard_hours,
                "reschedule_hours": self.reschedule_hours,
            }
        )


@dataclass(frozen=True)
class JobSize:
    """A training job.

    Attributes:
        total_hours: useful training time, without any overhead, ``T_total``.
        num_shards: shards of the embedding tables, one per server, ``N_emb``.
        shards_per_failure: different shards that one failure takes.
    """

    total_hours: float
    num_shards: int
    shards_per_failure: int = 1

    def __post_init__(self) -> None:
        require_positive({"total_hours": self.total_hours})
        if self.num_shards < 1:
            raise UsageError(f"num_shards is {self.num_shards}; it must be at least 1")
        if not 1 <= self.shards_per_failure <= self.num_shards:
            raise UsageError(
                f"shards_per_failure is {self.shards_per_failure}; a failure takes at least 1 and "
                f"at most all {self.num_shards} shards"
            )


@dataclass(frozen=True)
class SavePattern:
    """How a strategy saves: a share of the rows at a time, all of them once in ``T_save``.

    Saves are whole, so a fraction between ``1/n`` and ``1/(n - 1)`` takes ``n`` saves, as ``1/n``
    does, and each of them costs more.

    Attributes:
        fraction: share of the large tables' rows in one save; 1: all rows every ``T_save``.
        cost_share: what one such save costs, as a share of saving everything. It is more than
            ``fraction`` where small tables and the dense part are saved whole each time.
    """

    fraction: float = 1.0
    cost_share: float = 1.0

    def __post_init__(self) -> None:
        require_share("fraction", self.fraction)
        require_share("cost_share", self.cost_share)

    @property
    def saves_per_turn(self) -> int:
        """Saves after which each row can have been saved once."""
        return math.ceil(1 / self.fraction - 1e-9)

    def save_every_hours(self, interval_hours: float) -> float:
        """Return hours between two saves so that all rows have their turn in ``interval_hours``."""
        return interval_hours / self.saves_per_turn


ALL_ROWS = SavePattern()
