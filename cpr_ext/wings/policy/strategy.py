"""Ways to save and to recover, side by side in a plan, and which to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cpr_ext.wings.policy.costs import JobCosts, JobSize, duration
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


# Above this chance of a fallback in the job, the store is to be as new as without parity (ours).
LIKELY_FALLBACK = 0.01


def recommend(
    full: Strategy,
    vanilla: Strategy,
    most_used: Strategy,
    with_parity: Sequence[Strategy],
    target_pls: float,
) -> tuple[Strategy, str]:
    """Choose the strategy that costs least at the target.

    Parity loses nothing unless it falls back. If that is likely in the job, both
    are kept, as far as they still cost less than CPR or full recovery.

    Args:
        with_parity: parity alone and in front of CPR; empty: it is not considered.

    Returns:
        The strategy, and why.
    """
    best, why = _without_parity(full, vanilla, most_used, target_pls)
    if not with_parity:
        return best, why
    alone, before_cpr = with_parity
    chance = alone.fallback_chance or 0.0
    if alone.overhead_fraction >= best.overhead_fraction:
        return best, (
            f"{why} Parity would cost {percent(alone.overhead_fraction)}, and lose nothing unless "
            f"two of a group are lost together (a chance of {percent(chance)} in the job)."
        )
    likely = chance > LIKELY_FALLBACK
    if likely and before_cpr.overhead_fraction < best.overhead_fraction:
        return before_cpr, _why_parity(before_cpr, best, chance, "and keep CPR's snapshots")
    return alone, _why_parity(alone, best, chance, "and save all rows")


def _spelled(strategy: Strategy) -> str:
    return "full recovery" if strategy.name == "full" else strategy.name


def _why_parity(chosen: Strategy, best: Strategy, chance: float, what: str) -> str:
    return (
        f"Keep parity in peers' memory, {what} every {duration(chosen.save_every_hours)}: "
        f"{percent(chosen.overhead_fraction)} overhead instead of "
        f"{percent(best.overhead_fraction)} for {_spelled(best)}. No sample is lost unless two of "
        f"a group are lost together (a chance of {percent(chance)} in the job); then rows come "
        f"from the store."
    )


def percent(share: float) -> str:
    """Return a share in percent, three digits."""
    return f"{100 * share:.3g} %"


def _without_parity(
    full: Strategy, vanilla: Strategy, most_used: Strategy, target_pls: float
) -> tuple[Strategy, str]:
    """Choose the most used rows where that beats full recovery, else all rows if that does.

    Returns:
        The strategy, and why.
    """
    limit = full.overhead_fraction
    if most_used.overhead_fraction < limit and most_used.fraction < 1:
        rows = f"the {percent(most_used.fraction)} most used rows"
        return most_used, _why_partial(full, most_used, rows, target_pls)
    if vanilla.overhead_fraction < limit:
        why = _why_partial(full, vanilla, "all rows", target_pls)
        if most_used.fraction < 1:
            why += (
                f" Saving the {percent(most_used.fraction)} most used rows more often would cost "
                f"{percent(most_used.overhead_fraction)}."
            )
        return vanilla, why
    return full, _why_full(full, vanilla, target_pls)


def _why_partial(full: Strategy, best: Strategy, rows: str, target_pls: float) -> str:
    removed = 1 - best.overhead_fraction / full.overhead_fraction
    return (
        f"Recover partially and save {rows} every "
        f"{duration(best.save_every_hours)}: {percent(best.overhead_fraction)} overhead instead of "
        f"{percent(full.overhead_fraction)} for full recovery at its best interval "
        f"({percent(removed)} less), at an expected PLS of {best.expected.pls:.3g}, "
        f"target {target_pls:g}."
    )


def _why_full(full: Strategy, vanilla: Strategy, target_pls: float) -> str:
    return (
        f"Recover fully and save everything every {duration(full.interval_hours)}: to keep PLS at "
        f"{target_pls:g}, partial recovery would have to save every "
        f"{duration(vanilla.interval_hours)} and cost {percent(vanilla.overhead_fraction)}, more "
        f"than the {percent(full.overhead_fraction)} of full recovery, which loses no sample."
    )
