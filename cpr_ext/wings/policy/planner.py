"""How to recover, how often to save and which rows first, for a PLS one accepts.

The decision is CPR's (Maeng et al., MLSys 2021; re-derived). The interval follows from the target
PLS. The plan is partial recovery where that is then cheaper, else full recovery at its own optimum;
or parity in peers' memory, where that is. Each is judged by its own expected costs.
"""

from __future__ import annotations

from typing import Literal

from cpr_ext.wings.policy.costs import (
    ALL_ROWS,
    JobCosts,
    JobSize,
    SavePattern,
    require_positive,
    require_share,
)
from cpr_ext.wings.policy.expectation import (
    Expectation,
    Overhead,
    best_full_interval_hours,
    expected_full_recovery,
    expected_partial_recovery,
    full_recovery,
    partial_recovery,
)
from cpr_ext.wings.policy.parity import (
    ParityCosts,
    ParityExpectation,
    describe_parity,
    expected_parity,
    parity_interval_hours,
)
from cpr_ext.wings.policy.pls import interval_for_pls
from cpr_ext.wings.policy.strategy import (
    Plan,
    PriorityName,
    Strategy,
    StrategyName,
    percent,
    recommend,
)

_PRIORITIZED: tuple[tuple[StrategyName, PriorityName], ...] = (
    ("CPR-SCAR", "scar"),
    ("CPR-MFU", "mfu"),
    ("CPR-SSU", "ssu"),
)


class Planner:
    """Evaluates strategies for one job.

    Args:
        job: what runs.
        costs: what saving and recovering cost.
        mtbf_hours: mean time between failures of the whole job, at a constant rate.
        fraction: share of the large tables' rows that a priority saves at a time.
        cost_share: what such a save costs, as a share of saving everything; None: ``fraction``.
        parity: what parity in peers' memory costs; None: it is not considered.

    Raises:
        UsageError: an input is out of range.
    """

    def __init__(
        self,
        job: JobSize,
        costs: JobCosts,
        mtbf_hours: float,
        *,
        fraction: float = 0.125,
        cost_share: float | None = None,
        parity: ParityCosts | None = None,
    ) -> None:
        require_share("fraction", fraction)
        require_positive({"mtbf_hours": mtbf_hours})
        if parity is not None:
            parity.require_fit(job.num_shards)
        self.job = job
        self.costs = costs
        self.mtbf_hours = mtbf_hours
        self.parity = parity
        self.pattern = SavePattern(fraction, fraction if cost_share is None else cost_share)

    def plan(self, target_pls: float) -> Plan:
        """Return all strategies, and the one to take.

        Raises:
            UsageError: the target is not a share.
        """
        best = best_full_interval_hours(self.costs, self.job, self.mtbf_hours)
        interval = interval_for_pls(self.job, self.mtbf_hours, target_pls)
        full = self.full_recovery(best)
        vanilla = self.partial_recovery("CPR-vanilla", "all", interval)
        prioritized = [self.partial_recovery(*each, interval) for each in _PRIORITIZED]
        with_parity: tuple[Strategy, ...] = ()
        if self.parity is not None:
            with_parity = (
                self.parity_alone(target_pls),
                # As CPR saves without parity; fallbacks read these snapshots.
                self._with_parity("parity + CPR", "mfu", interval, self.pattern),
            )
        recommended, reason = recommend(full, vanilla, prioritized[1], with_parity, target_pls)
        return Plan(
            job=self.job,
            costs=self.costs,
            target_pls=target_pls,
            mtbf_hours=self.mtbf_hours,
            strategies=(
                full,
                self.partial_recovery("partial, full's interval", "all", best),
                vanilla,
                *prioritized,
                *with_parity,
            ),
            recommended=recommended,
            reason=reason,
            notes=self._notes(interval),
        )

    def full_recovery(self, interval_hours: float) -> Strategy:
        """Full recovery at an interval."""
        given = (self.costs, self.job, self.mtbf_hours, interval_hours)
        return self._strategy(
            ("full", "full", "all"),
            interval_hours,
            ALL_ROWS,
            expected_full_recovery(*given),
            full_recovery(*given),
        )

    def partial_recovery(
        self, name: StrategyName, priority: PriorityName, interval_hours: float
    ) -> Strategy:
        """Partial recovery; ``priority`` ``"all"`` saves all rows at once."""
        given = (self.costs, self.job, self.mtbf_hours, interval_hours)
        pattern = ALL_ROWS if priority == "all" else self.pattern
        return self._strategy(
            (name, "partial", priority),
            interval_hours,
            pattern,
            expected_partial_recovery(*given, pattern=pattern),
            partial_recovery(*given),
        )

    def parity_alone(self, target_pls: float, pattern: SavePattern = ALL_ROWS) -> Strategy:
        """Parity that saves all rows only as often as fallbacks require. REQUIRES: parity."""
        assert self.parity is not None
        given = (self.costs, self.job, self.parity, self.mtbf_hours)
        interval = parity_interval_hours(*given, target_pls)
        return self._with_parity("parity", "all", interval, pattern)

    def _with_parity(
        self, name: StrategyName, priority: PriorityName, interval: float, pattern: SavePattern
    ) -> Strategy:
        assert self.parity is not None
        given = (self.costs, self.job, self.parity, self.mtbf_hours, interval)
        expected = expected_parity(*given, pattern=pattern)
        return self._strategy(
            (name, "exact", priority), interval, pattern, expected, expected.overhead
        )

    def _strategy(
        self,
        what: tuple[StrategyName, Literal["full", "partial", "exact"], PriorityName],
        interval_hours: float,
        pattern: SavePattern,
        expected: Expectation,
        formula: Overhead,
    ) -> Strategy:
        chance = expected.fallback_chance if isinstance(expected, ParityExpectation) else None
        return Strategy(
            *what,
            interval_hours=interval_hours,
            save_every_hours=pattern.save_every_hours(interval_hours),
            fraction=pattern.fraction,
            expected=expected,
            overhead_fraction=expected.overhead.fraction_of(self.job),
            formula_overhead_fraction=formula.fraction_of(self.job),
            fallback_chance=chance,
        )

    def _notes(self, cpr_interval_hours: float) -> tuple[str, ...]:
        notes = [
            "Overhead and PLS are expected values with whole saves; 'formula' is the paper's, "
            f"which takes {self.job.total_hours / cpr_interval_hours:.2f} saves of all rows "
            f"in {self.job.total_hours:g} h as that many.",
            "PLS counts samples, so a priority has the PLS of saving all rows at the same "
            "interval; what it changes is accuracy: the rows that matter most are saved more "
            "often.",
            "Partial recovery needs workers that train on while one is replaced: cpr launch, or "
            "torchrun with a Worker. A job that restarts as a whole repeats everything since its "
            "last save: it is the row 'full'.",
        ]
        if self.parity is not None:
            notes.append(describe_parity(self.costs, self.job, self.parity, self.mtbf_hours))
        saves, fraction = self.pattern.saves_per_turn, self.pattern.fraction
        if saves * fraction > 1 + 1e-6:
            notes.append(
                f"A share of {percent(fraction)} takes {saves} saves for all rows, as 1/{saves} "
                f"does; 1/{saves} writes {percent(1 - 1 / (saves * fraction))} fewer rows."
            )
        return tuple(notes)
