"""Ways to save and to recover, side by side in a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cpr_ext.wings.policy.costs import JobCosts, JobSize
from cpr_ext.wings.policy.expectation import Expectation

StrategyName = Literal[
    "full",
    "partial, full's interval",
    "CPR-vanilla",
    "CPR-SCAR",
    "CPR-MFU",
    "CPR-SSU",
    "parity",
    "parity + CPR",
]
PriorityName = Literal["all", "scar", "mfu", "ssu"]


@dataclass(frozen=True)
class Strategy:
    """A way to save and to recover, and what it costs the job.

    Attributes:
        name, recovery, priority: what it is.
        interval_hours: in which all rows have their turn to be saved, ``T_save``.
        save_every_hours: between two saves; ``interval_hours / n`` for a priority that needs ``n``
            saves for all rows.
        fraction: share of the large tables' rows that one save takes.
        expected: overhead by part, failures and PLS.
        overhead_fraction: all overhead, as a share of useful training time.
        formula_overhead_fraction: the same by the paper's formula.
        bytes_per_hour: written, per hour of training; None if the sizes are not known.
        fallback_chance: that parity does not suffice once in the job; None: no parity.
    """

    name: StrategyName
    recovery: Literal["full", "partial", "exact"]
    priority: PriorityName
    interval_hours: float
    save_every_hours: float
    fraction: float
    expected: Expectation
    overhead_fraction: float
    formula_overhead_fraction: float
    bytes_per_hour: float | None
    fallback_chance: float | None = None


@dataclass(frozen=True)
class Plan:
    """All strategies side by side.

    Attributes:
        target_pls: the PLS one accepts.
        mtbf_hours: mean time between failures of the job.
        strategies: in the order of the table; the first is full recovery at its optimum.
        recommended: one of them.
        reason: why, in one sentence.
        notes: what the figures rest on, one sentence each.
    """

    job: JobSize
    costs: JobCosts
    target_pls: float
    mtbf_hours: float
    strategies: tuple[Strategy, ...]
    recommended: Strategy
    reason: str
    notes: tuple[str, ...]
