"""The schedule that plans: as often as the accepted loss of training requires."""

from __future__ import annotations

from cpr_ext.errors import UsageError
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.runtime.validation import as_number
from cpr_ext.saving.schedules import Progress, RunCosts, Schedule, WhenBusy
from cpr_ext.wings.policy.costs import (
    JobCosts,
    JobSize,
    duration,
    require_not_negative,
    require_positive,
    require_share,
)
from cpr_ext.wings.policy.expectation import expected_partial_recovery
from cpr_ext.wings.policy.parity import ParityCosts
from cpr_ext.wings.policy.planner import Planner
from cpr_ext.wings.policy.pls import interval_for_pls
from cpr_ext.wings.policy.strategy import Plan, Strategy

logger = logger_of("schedules")

# A job of unknown length is planned as one of so many failures.
_MANY_FAILURES = 100
_CHANGE = 0.25  # by which a figure must have changed to plan again
_DEARER = "TargetPLS(%g): keeping to the target costs as much as full recovery, or more. %s"
_OWN_DEATH = (
    "TargetPLS(%g) counts lost shards only. If this process itself dies, it repeats its training "
    "since the newest snapshot, one every %s; add '| EverySeconds(...)' to bound that"
)


class TargetPLS(Schedule):
    """Save as rarely as a target for expected PLS, the portion of lost samples, allows.

    All rows have their turn every ``T_save = 2*PLS*N_emb*T_fail/k`` hours (CPR; ``k`` shards per
    failure), at most the job. A priority that needs ``n`` saves for all rows saves every
    ``T_save/n``. The plan is made again when measured costs have changed by a quarter, and
    decisions are logged to the logger ``cpr_ext``. The schedule always keeps to the target; if that
    costs more than full recovery would, it logs a warning.

    PLS counts the rows of lost shards. It ignores the computation that a process loses when it dies
    itself: it repeats the training since its newest snapshot. In a single process add
    ``| EverySeconds(...)``, which bounds that.

    Args:
        target_pls: share of training whose effect on the tables failures may remove, in (0, 1].
        mtbf_hours: mean time between failures of the whole job, at a constant rate; as
            ``cpr_ext.wings.policy.fit_failures(log).mtbf_hours`` finds it.
        total_samples: samples of the whole job, or
        total_hours: its training time. One of them lets a short job save less often than the
            formula says; without, the job is taken as long. With ``total_samples`` the running PLS
            in the checkpointer's metrics is that of the whole job, else that of the samples so far.
        shards_per_failure: shards that one failure takes.
        num_shards: of the whole job, if each worker's checkpointer holds one of them.
        reschedule_hours: to replace failed nodes; counts in the comparison with full recovery.
        parity: what parity in peers' memory costs, if the workers hold it. Then snapshots serve
            only failures that parity does not make good, and are as rare as those allow.

    Attributes:
        interval_hours: between two snapshots; None until the checkpointer has begun.
        plan: the newest plan; None until saving has been measured.

    Raises:
        UsageError: a value out of range.
    """

    def __init__(
        self,
        target_pls: float,
        *,
        mtbf_hours: float,
        total_samples: int | None = None,
        total_hours: float | None = None,
        shards_per_failure: int = 1,
        reschedule_hours: float = 0.0,
        num_shards: int | None = None,
        parity: ParityCosts | None = None,
        when_busy: WhenBusy = "delay",
    ) -> None:
        require_share("target_pls", as_number("target_pls", target_pls))
        if total_samples is not None and total_hours is not None:
            raise UsageError("total_samples and total_hours both set the job's length; give one")
        lengths = {"total_samples": total_samples, "total_hours": total_hours}
        given = {name: value for name, value in lengths.items() if value is not None}
        require_positive({"mtbf_hours": as_number("mtbf_hours", mtbf_hours), **given})
        require_not_negative({"reschedule_hours": reschedule_hours})
        for name, number in (
            ("shards_per_failure", shards_per_failure),
            ("num_shards", num_shards),
        ):
            if number is not None and number < 1:
                raise UsageError(f"{name} is {number}; it must be at least 1")
        self.target_pls = target_pls
        self.mtbf_hours = mtbf_hours
        self.total_samples = total_samples
        self.total_hours = total_hours
        self.shards_per_failure = shards_per_failure
        self.reschedule_hours = reschedule_hours
        self.num_shards = num_shards
        self.parity = parity
        self.when_busy = when_busy
        self.interval_hours: float | None = None
        self.plan: Plan | None = None
        self._planned_with: tuple[float, ...] | None = None
        self._fraction: float | None = None
        self._said: tuple[float, str] | None = None
        self._with_parity: Strategy | None = None

    def __repr__(self) -> str:
        return f"TargetPLS({self.target_pls}, mtbf_hours={self.mtbf_hours:g})"

    def is_due(self, since_last: Progress) -> bool:  # noqa: D102
        interval_hours = self.interval_hours
        return interval_hours is not None and since_last.seconds >= 3600 * interval_hours

    def job_samples(self) -> int | None:  # noqa: D102
        return self.total_samples

    def observe(self, costs: RunCosts) -> None:
        """Plan, if this is the first time or costs have changed by more than a quarter.

        Raises:
            UsageError: a failure takes more shards than there are, or parity groups do not fit.
        """
        job = self._job(costs)
        known = (
            job.total_hours,
            job.num_shards,
            costs.fraction,
            costs.save_hours or 0.0,
            costs.load_hours or 0.0,
            costs.load_shard_hours or 0.0,
            (costs.prioritized_bytes or 0.0) + costs.other_bytes,
        )
        if self._planned_with is not None and all(map(_about_same, known, self._planned_with)):
            return
        self._planned_with, self._fraction = known, costs.fraction
        planner = self._planner(job, costs)
        turn_hours = interval_for_pls(job, self.mtbf_hours, self.target_pls)
        pls = expected_partial_recovery(
            planner.costs, job, self.mtbf_hours, turn_hours, pattern=planner.pattern
        ).pls
        self._with_parity = None
        if costs.save_hours and self.parity is not None:
            self._with_parity = planner.parity_alone(self.target_pls, planner.pattern)
            turn_hours, pls = self._with_parity.interval_hours, self._with_parity.expected.pls
        self.interval_hours = planner.pattern.save_every_hours(turn_hours)
        self.plan = planner.plan(self.target_pls) if costs.save_hours else None
        self._log(job, turn_hours, pls)

    def _job(self, costs: RunCosts) -> JobSize:
        total_hours = self.total_hours
        if self.total_samples is not None and costs.samples_per_hour:
            total_hours = self.total_samples / costs.samples_per_hour
        if total_hours is None:
            total_hours = _MANY_FAILURES * self.mtbf_hours
        return JobSize(total_hours, self.num_shards or costs.num_shards, self.shards_per_failure)

    def _planner(self, job: JobSize, costs: RunCosts) -> Planner:
        save_hours = costs.save_hours or 1e-9
        # What was not read yet takes about as long to read as it took to write.
        load_hours = save_hours if costs.load_hours is None else costs.load_hours
        load_shard_hours = costs.load_shard_hours
        if load_shard_hours is None:
            load_shard_hours = load_hours * job.shards_per_failure / job.num_shards
        cost_share = None
        if costs.prioritized_bytes:
            saved_bytes = costs.fraction * costs.prioritized_bytes + costs.other_bytes
            cost_share = saved_bytes / (costs.prioritized_bytes + costs.other_bytes)
        return Planner(
            job,
            JobCosts(save_hours, load_hours, load_shard_hours, self.reschedule_hours),
            self.mtbf_hours,
            fraction=costs.fraction,
            cost_share=cost_share,
            parity=self.parity,
        )

    def _log(self, job: JobSize, turn_hours: float, pls: float) -> None:
        assert self.interval_hours is not None
        text = (
            f"TargetPLS({self.target_pls:g}): a snapshot every {duration(self.interval_hours)}, "
            f"all rows in turn every {duration(turn_hours)}, expected PLS {pls:.3g} on "
            f"{job.num_shards} shards at an MTBF of {self.mtbf_hours:.3g} h"
        )
        cheaper = ""
        if self.plan is not None:
            own, full = self._own_strategy(self.plan), self.plan.strategies[0]
            cheaper = "full" if full.overhead_fraction <= own.overhead_fraction else "partial"
            text += (
                f"; overhead about {100 * own.overhead_fraction:.2g} %, full recovery "
                f"{100 * full.overhead_fraction:.2g} %"
            )
        if self.parity is not None and self._with_parity is not None:
            chance = self._with_parity.fallback_chance or 0.0
            text += (
                f"; parity {self.parity.name} does not suffice with a chance of "
                f"{100 * chance:.2g} %, and snapshots serve only that"
            )
        said, self._said = self._said, (self.interval_hours, cheaper)
        if said is not None and said[1] == cheaper and _about_same(said[0], self.interval_hours):
            self._said = said
            logger.debug(text)
            return
        logger.info(text)
        if said is None and self.num_shards is None:
            logger.info(_OWN_DEATH, self.target_pls, duration(self.interval_hours))
        if self.plan is not None and cheaper == "full" and (said is None or said[1] != "full"):
            logger.warning(_DEARER, self.target_pls, self.plan.reason)

    def _own_strategy(self, plan: Plan) -> Strategy:
        """Return what this schedule does: the priorities of a fraction cost the same."""
        assert self._fraction is not None
        if self._with_parity is not None:
            return self._with_parity
        return next(s for s in plan.strategies[2:] if s.fraction == self._fraction)


def _about_same(new: float, old: float) -> bool:
    return abs(new - old) <= _CHANGE * max(abs(old), 1e-12)
