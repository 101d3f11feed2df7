"""How to recover, how often to save and which rows first, for a PLS one accepts.

The decision is CPR's (Maeng et al., MLSys 2021; re-derived). The interval follows from the target
PLS. The plan is partial recovery where that is then cheaper, else full recovery at its own optimum;
or parity in peers' memory, where that is. Each is judged by its own expected costs.
"""

from __future__ import annotations

from typing import Literal

from cpr_ext.wings.policy.checks import require_share
from cpr_ext.wings.policy.costs import ALL_ROWS, JobCosts, JobSize, SavePattern, StateBytes
from cpr_ext.wings.policy.expectation import (
    Expectation,
    FailureClock,
    best_full_interval_hours,
    expected_full_recovery,
    expected_partial_recovery,
)
from cpr_ext.wings.policy.failure_models import ExponentialFailures, FailureModel, GammaFailures
from cpr_ext.wings.policy.overhead import full_recovery, partial_recovery
from cpr_ext.wings.policy.parity_costs import ParityCosts
from cpr_ext.wings.policy.parity_strategy import ParityStrategies
from cpr_ext.wings.policy.pls import interval_for_pls
from cpr_ext.wings.policy.recommendation import percent, recommend
from cpr_ext.wings.policy.simulation import (
    DEFAULT_HISTORIES,
    simulate_full_recovery,
    simulate_partial_recovery,
)
from cpr_ext.wings.policy.strategy import Plan, PriorityName, Strategy, StrategyName

_PRIORITIZED: tuple[tuple[StrategyName, PriorityName], ...] = (
    ("CPR-SCAR", "scar"),
    ("CPR-MFU", "mfu"),
    ("CPR-SSU", "ssu"),
)
# Relative error of overhead and PLS, up to which the mean rate stands for a gamma model.
_RENEWAL_TOLERANCE = 0.01
# Failures to simulate for one figure: of a long job, fewer histories tell as much.
_ENOUGH_FAILURES = 2_000_000
_LEAST_HISTORIES = 20


class Planner:
    """Evaluates strategies for one job.

    Args:
        job: what runs.
        costs: what saving and recovering cost.
        failures: when failures come.
        fraction: share of the large tables' rows that a priority saves at a time.
        state_bytes: what one save of everything writes, if known.
        parity: what parity in peers' memory costs; None: it is not considered.
        row_share: bytes of a row in a save of a priority, as a share of those in float32, see
            :func:`cpr_ext.wings.policy.precision.bytes_share`. Saves of all rows are exact.
        charges: what the time of a save grows with, its ``bytes`` or its ``rows``; they differ
            where ``row_share`` is below 1.
        clock: when failures strike, see :mod:`cpr_ext.wings.policy.expectation`.
        histories, seed: of the simulation, where it is needed; a job of very many failures is
            played fewer times.

    Raises:
        UsageError: an input is out of range.
    """

    def __init__(
        self,
        job: JobSize,
        costs: JobCosts,
        failures: FailureModel,
        *,
        fraction: float = 0.125,
        state_bytes: StateBytes | None = None,
        parity: ParityCosts | None = None,
        row_share: float = 1.0,
        charges: Literal["bytes", "rows"] = "bytes",
        clock: FailureClock = "training",
        histories: int = DEFAULT_HISTORIES,
        seed: int = 0,
    ) -> None:
        require_share("fraction", fraction)
        if parity is not None:
            parity.require_fit(job.num_shards)
        self.job = job
        self.parity = parity
        self.costs = costs
        self.failures = failures
        self.state_bytes = state_bytes
        self.clock: FailureClock = clock
        enough = int(_ENOUGH_FAILURES * failures.mean_hours / job.total_hours)
        self.histories = min(histories, max(enough, _LEAST_HISTORIES))
        self.seed = seed
        self.charges: Literal["bytes", "rows"] = charges
        self.pattern = self.pattern_of(fraction, row_share)
        self.why_simulated = _why_formulas_do_not_hold(job, failures, clock)

    def pattern_of(self, fraction: float, row_share: float) -> SavePattern:
        """Return how a priority saves this share of the rows, in this share of their bytes."""
        charged = row_share if self.charges == "bytes" else 1.0
        if self.state_bytes is None:
            return SavePattern(fraction, fraction * charged, row_share)
        return SavePattern(fraction, self.state_bytes.share_saved(fraction, charged), row_share)

    def written_share(self, pattern: SavePattern) -> float:
        """Return the bytes of a save, as a share of those of the same save in float32."""
        if self.state_bytes is None:
            return pattern.row_share
        exact = self.state_bytes.share_saved(pattern.fraction)
        return self.state_bytes.share_saved(pattern.fraction, pattern.row_share) / exact

    def plan(self, target_pls: float) -> Plan:
        """Return all strategies, and the one to take.

        Raises:
            UsageError: the target is not a share, or the job would hardly ever end.
        """
        require_share("target_pls", target_pls)
        full = self.full_recovery(self.best_full_interval_hours())
        interval = self.interval_for_pls(target_pls)
        at_a_time = self.interval_for_pls(target_pls, self.pattern)
        vanilla = self.partial_recovery("CPR-vanilla", "all", interval)
        prioritized = [self.partial_recovery(*each, at_a_time) for each in _PRIORITIZED]
        strategies = [
            full,
            self.partial_recovery("partial, full's interval", "all", full.interval_hours),
            vanilla,
            *prioritized,
        ]
        most_used = next(s for s in prioritized if s.priority == "mfu")
        with_parity = self.with_parity(target_pls, at_a_time)
        recommended, reason = recommend(full, vanilla, most_used, with_parity, target_pls)
        return Plan(
            job=self.job,
            costs=self.costs,
            target_pls=target_pls,
            mtbf_hours=self.failures.mean_hours,
            clock=self.clock,
            strategies=(*strategies, *with_parity),
            recommended=recommended,
            reason=reason,
            notes=self._notes(interval),
        )

    def with_parity(self, target_pls: float, cpr_interval_hours: float) -> tuple[Strategy, ...]:
        """Return parity alone, and in front of CPR's snapshots; none if it is not considered."""
        if (strategies := self.parity_strategies()) is None:
            return ()
        return strategies.alone(target_pls), strategies.before_cpr(cpr_interval_hours)

    def parity_strategies(self) -> ParityStrategies | None:
        """Return what parity adds to the plan; None: it is not considered."""
        if self.parity is None:
            return None
        return ParityStrategies(
            self.job,
            self.costs,
            self.parity,
            self.failures,
            self.pattern,
            self.clock,
            histories=self.histories if self.why_simulated else 0,
            seed=self.seed,
            bytes_per_hour=self.bytes_per_hour,
        )

    def full_recovery(self, interval_hours: float) -> Strategy:
        """Full recovery at an interval."""
        given = (self.costs, self.job)
        expected: Expectation
        if self.why_simulated:
            expected = simulate_full_recovery(
                *given,
                self.failures,
                interval_hours,
                clock=self.clock,
                histories=self.histories,
                seed=self.seed,
            )
        else:
            expected = expected_full_recovery(
                *given, self.failures.mean_hours, interval_hours, clock=self.clock
            )
        formula = full_recovery(*given, self.failures.mean_hours, interval_hours)
        return Strategy(
            name="full",
            recovery="full",
            priority="all",
            interval_hours=interval_hours,
            save_every_hours=interval_hours,
            fraction=1.0,
            expected=expected,
            overhead_fraction=expected.overhead.fraction_of(self.job),
            formula_overhead_fraction=formula.fraction_of(self.job),
            bytes_per_hour=self.bytes_per_hour(interval_hours, ALL_ROWS),
        )

    def partial_recovery(
        self, name: StrategyName, priority: PriorityName, interval_hours: float
    ) -> Strategy:
        """Partial recovery; ``priority`` ``"all"`` saves all rows at once."""
        pattern = ALL_ROWS if priority == "all" else self.pattern
        expected = self.expected_partial(interval_hours, pattern)
        formula = partial_recovery(self.costs, self.job, self.failures.mean_hours, interval_hours)
        return Strategy(
            name=name,
            recovery="partial",
            priority=priority,
            interval_hours=interval_hours,
            save_every_hours=pattern.save_every_hours(interval_hours),
            fraction=pattern.fraction,
            expected=expected,
            overhead_fraction=expected.overhead.fraction_of(self.job),
            formula_overhead_fraction=formula.fraction_of(self.job),
            bytes_per_hour=self.bytes_per_hour(interval_hours, pattern),
        )

    def best_full_interval_hours(self) -> float:
        """Return where full recovery costs least: Young's interval, made to divide the job.

        Where the formulas do not hold, the best of some numbers of saves around that.
        """
        best = best_full_interval_hours(
            self.costs, self.job, self.failures.mean_hours, clock=self.clock
        )
        if not self.why_simulated:
            return best
        saves = round(self.job.total_hours / best)
        tried = {max(1, round(saves * factor)) for factor in (0.5, 0.7, 0.85, 1, 1.2, 1.4, 2)}
        intervals = [self.job.total_hours / number for number in sorted(tried)]
        return min(intervals, key=lambda hours: self.full_recovery(hours).overhead_fraction)

    def interval_for_pls(self, target_pls: float, pattern: SavePattern = ALL_ROWS) -> float:
        """Return the longest interval, at most the job, that keeps expected PLS at the target.

        The paper's formula, shortened where the clock or the failure model loses more than it says.
        """
        interval = interval_for_pls(self.job, self.failures.mean_hours, target_pls)
        for _ in range(8):
            pls = self.expected_partial(interval, pattern).pls
            if pls <= target_pls * (1 + 1e-9):
                break
            interval *= target_pls / pls
        return interval

    def expected_partial(self, interval_hours: float, pattern: SavePattern) -> Expectation:
        """Return cost and loss of partial recovery, by formula or simulation."""
        if self.why_simulated:
            return simulate_partial_recovery(
                self.costs,
                self.job,
                self.failures,
                interval_hours,
                pattern=pattern,
                clock=self.clock,
                histories=self.histories,
                seed=self.seed,
            )
        return expected_partial_recovery(
            self.costs,
            self.job,
            self.failures.mean_hours,
            interval_hours,
            pattern=pattern,
            clock=self.clock,
        )

    def bytes_per_hour(self, interval_hours: float, pattern: SavePattern) -> float | None:
        """Return the bytes written per hour of training; None if sizes are not known."""
        if self.state_bytes is None:
            return None
        share = self.state_bytes.share_saved(pattern.fraction, pattern.row_share)
        return share * self.state_bytes.total_bytes / pattern.save_every_hours(interval_hours)

    def _notes(self, cpr_interval_hours: float) -> tuple[str, ...]:
        notes = []
        if self.why_simulated:
            notes.append(
                f"Overhead and PLS are means of {self.histories} simulated failure histories, "
                f"because {self.why_simulated}."
            )
        else:
            notes.append(
                "Overhead and PLS are expected values with whole saves; 'formula' is the paper's, "
                f"which takes {self.job.total_hours / cpr_interval_hours:.2f} saves of all rows "
                f"in {self.job.total_hours:g} h as that many."
            )
        nearly = "nearly " if self.clock == "running" else ""
        notes.append(
            f"PLS counts samples, so a priority has {nearly}the PLS of saving all rows at the same "
            "interval; what it changes is accuracy: the rows that matter most are saved more often."
        )
        notes.append(
            "Partial recovery needs workers that train on while one is replaced: cpr launch, or "
            "torchrun with a Worker. A job that restarts as a whole repeats everything since its "
            "last save: it is the row 'full'."
        )
        if (with_parity := self.parity_strategies()) is not None:
            notes.extend(with_parity.notes())
        saves, fraction = self.pattern.saves_per_turn, self.pattern.fraction
        if saves * fraction > 1 + 1e-6:
            notes.append(
                f"A share of {percent(fraction)} takes {saves} saves for all rows, as 1/{saves} "
                f"does; 1/{saves} writes {percent(1 - 1 / (saves * fraction))} fewer rows."
            )
        return tuple(notes)


def _why_formulas_do_not_hold(
    job: JobSize, failures: FailureModel, clock: FailureClock
) -> str | None:
    """Return why the simulation is needed; None: failures strike at a constant rate, as good as."""
    if isinstance(failures, ExponentialFailures):
        return None
    if not isinstance(failures, GammaFailures):
        return "failures are drawn from times that were seen, not from a constant rate"
    if clock == "running":
        return "the hazard of these failures is not constant, and they strike while work is redone"
    # Renewal theory: E[failures] = T/M + (CV^2 - 1)/2 for a job that is long against M. And the
    # more evenly failures come, the longer they keep step with saves (0.3: from simulations).
    variation = failures.squared_variation
    error = abs(variation - 1) * (0.5 + 0.3 / variation) * failures.mean_hours / job.total_hours
    if error > _RENEWAL_TOLERANCE:
        return (
            f"the hazard of these failures is not constant (shape {failures.shape:.2f}) and a job "
            f"of {job.total_hours:g} h is not long against an MTBF of {failures.mean_hours:.3g} h"
        )
    return None
