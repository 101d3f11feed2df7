"""Which rows a partial snapshot saves first. A priority makes the tracker that each table needs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from cpr_ext.runtime.cuda import device_of, record_on_stream
from cpr_ext.runtime.validation import as_number, as_whole_number
from cpr_ext.state.table import Table


@dataclass(frozen=True)
class Priority(ABC):
    """Base of the strategies.

    Attributes:
        fraction: share of a table's rows that one partial snapshot saves, in (0, 1].
    """

    fraction: float = 0.125

    def __post_init__(self) -> None:
        if not 0 < as_number(f"{type(self).__name__}: fraction", self.fraction) <= 1:
            raise UsageError(
                f"{type(self).__name__}: fraction is {self.fraction}; allowed: above 0, at most 1"
            )

    @abstractmethod
    def make_tracker(self, table: Table) -> native.RowTracker:
        """Return the native tracker of ``table``."""

    def budget(self, num_rows: int) -> int:
        """Return how many of ``num_rows`` rows one partial snapshot saves."""
        return math.ceil(self.fraction * num_rows)


@dataclass(frozen=True)
class MostFrequentlyUsed(Priority):
    """MFU: the rows looked up most often since they were last saved. 4 bytes per row."""

    def make_tracker(self, table: Table) -> native.RowTracker:  # noqa: D102
        return _tracker("AccessCounter", table, num_rows=table.num_embeddings)


@dataclass(frozen=True)
class SubSampledUsed(Priority):
    """SSU: rows found by sampling one lookup in ``period`` into a bounded list.

    Other changed rows, chosen at random, fill what the list leaves of the budget. Which of the
    ``period`` is sampled is random, too, so that every column of a bag is sampled alike.
    Takes 2 bits per row and the list of at most ``fraction * num_rows`` row ids; when it is full a
    random one is evicted. Same ``seed``, same lookups: same rows; on a GPU while none is evicted.
    """

    period: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        as_whole_number("SubSampledUsed: period", self.period, 1)
        as_whole_number("SubSampledUsed: seed", self.seed, 0)

    def make_tracker(self, table: Table) -> native.RowTracker:  # noqa: D102
        return _tracker(
            "RowSampler",
            table,
            num_rows=table.num_embeddings,
            capacity=self.budget(table.num_embeddings),
            period=self.period,
            seed=self.seed,
        )


@dataclass(frozen=True)
class LargestChange(Priority):
    """SCAR: the rows whose weight changed most (L2) since they were last saved.

    Keeps a copy of every prioritized table's weight, on the table's device.
    """

    def make_tracker(self, table: Table) -> native.RowTracker:  # noqa: D102
        weight = table.weight.detach()
        record_on_stream(weight)
        return _tracker("ChangeMeter", table, weight=weight)


@dataclass(frozen=True)
class AllRows(Priority):
    """Every row that changed since it was last saved. 1 bit per row.

    With a fraction below 1 the changed rows of a table take turns: each is saved within
    ``ceil(1 / fraction)`` snapshots that are committed, whatever its id.
    """

    fraction: float = 1.0

    def make_tracker(self, table: Table) -> native.RowTracker:  # noqa: D102
        return _tracker("DirtyRows", table, num_rows=table.num_embeddings)


def _tracker(kind: str, table: Table, **options: Any) -> native.RowTracker:
    """Make a native tracker of a class on the CPU, or of its like for the GPU of a table."""
    if (device := device_of(table.weight)) is not None:
        kind, options = f"Device{kind}", {**options, "device": device}
    tracker: native.RowTracker = getattr(native, kind)(name=table.name, **options)
    return tracker


def make_tracker(priority: Priority, table: Table, is_prioritized: bool) -> native.RowTracker:
    """Return the tracker of a table; one to which no priority applies is counted row by row."""
    return (priority if is_prioritized else MostFrequentlyUsed()).make_tracker(table)
