"""Play one strategy and seed: train for real, fail as drawn, recover by the rules, charge."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.dlrm.batch import DataSource
from cpr_ext.wings.lab.dlrm.failures import PlannedFailure
from cpr_ext.wings.lab.dlrm.presets import find_preset
from cpr_ext.wings.lab.dlrm.sources import open_source
from cpr_ext.wings.lab.dlrm.trainer import (
    Trainer,
    TrainingProgress,
    TrainOptions,
    TrainResult,
    end_sample,
)
from cpr_ext.wings.lab.emulation.parity_groups import PlayedGroups
from cpr_ext.wings.lab.emulation.scenario import (
    DrawnFailure,
    EmulatedStrategy,
    EmulatedStrategyName,
    Scenario,
)
from cpr_ext.wings.policy import JobCosts, Overhead, ParityCosts, RunningPLS
from cpr_ext.wings.policy.parity import unprotected_hours


@dataclass(frozen=True)
class EmulatedClock:
    """Maps a training run onto a job of ``job_hours``; time runs with the samples trained.

    The clock counts useful training. The times of saving, loading and waiting are charged
    separately, and samples that full recovery trains again do not advance it a second time.

    Attributes:
        job_hours: useful training time of the job, T_total.
        total_samples: samples of the whole run, S_total.
        samples_per_step: samples of one training step (the last step may have fewer).

    Raises:
        UsageError: no hours, or no whole sample.
    """

    job_hours: float
    total_samples: int
    samples_per_step: int

    def __post_init__(self) -> None:
        if not (self.job_hours > 0 and math.isfinite(self.job_hours)):
            raise UsageError(f"job hours are {self.job_hours}; they must be positive")
        if self.total_samples < 1 or self.samples_per_step < 1:
            raise UsageError(
                f"total_samples is {self.total_samples} and samples_per_step "
                f"{self.samples_per_step}; both must be at least 1"
            )

    @property
    def total_steps(self) -> int:
        """Training steps of the whole run."""
        return math.ceil(self.total_samples / self.samples_per_step)

    @property
    def hours_per_step(self) -> float:
        """Emulated hours that one whole training step stands for."""
        return self.job_hours * self.samples_per_step / self.total_samples

    def hours(self, num_samples: int) -> float:
        """Return emulated hours after ``num_samples`` samples."""
        return self.job_hours * num_samples / self.total_samples

    def step_at(self, hours: float) -> int:
        """Return the training step, counted from 1, that ends nearest to ``hours``.

        Raises:
            UsageError: before the start or after the end of the job.
        """
        if not 0 <= hours <= self.job_hours:
            raise UsageError(f"hour {hours} is not within the job, 0 to {self.job_hours} hours")
        return min(max(1, round(hours / self.hours_per_step)), self.total_steps)

    def interval_steps(self, interval_hours: float) -> int:
        """Return an interval in whole steps, the nearest number.

        Raises:
            UsageError: it is less than half a step, so that this run cannot show it.
        """
        if not interval_hours > 0:
            raise UsageError(f"interval is {interval_hours} hours; it must be positive")
        steps = interval_hours / self.hours_per_step
        if steps < 0.5:
            raise UsageError(
                f"a save every {interval_hours:.3g} h cannot be played: one training step stands "
                f"for {self.hours_per_step:.3g} h. Train more steps (epochs, or a smaller batch)"
            )
        return round(min(steps, self.total_steps)) or 1


@dataclass(frozen=True)
class PlayedFailure:
    """One emulated failure.

    Attributes:
        hour: emulated hours of useful training when it struck.
        num_samples: samples trained by then.
        shards: the shards lost.
        lost_computation_hours: training done again by full recovery; 0 with partial recovery.
        rows_restored, rows_stale: as in the ``RecoveryReport``.
        recover_seconds: how long this machine took to restore the rows.
        is_by_parity: peers' memory had all rows, so that nothing was lost and nothing played.
    """

    hour: float
    num_samples: int
    shards: tuple[int, ...]
    lost_computation_hours: float
    rows_restored: int
    rows_stale: int | None
    recover_seconds: float
    is_by_parity: bool = False


def charge(
    strategy: EmulatedStrategy,
    num_saves: int,
    failures: Sequence[PlayedFailure],
    costs: JobCosts,
    parity: ParityCosts | None = None,
    job_hours: float = 0.0,
) -> Overhead:
    """Return the overhead of a run.

    - each save: ``fraction * save_hours``, a save of all rows being 1;
    - each failure, full recovery: ``load_hours``, the computation lost since the last save, and
      ``reschedule_hours``;
    - each failure, partial recovery: ``load_shard_hours`` and ``reschedule_hours``; shards lost
      together load side by side, and nobody computes anything again;
    - with parity: its share of ``job_hours``; each failure, rebuilding as far as training waits for
      it and ``reschedule_hours``; ``load_shard_hours`` only if parity did not suffice.

    Args:
        num_saves: saves taken during the job, those at its start and its end not counted.
    """
    is_full = strategy.recovery == "full"
    load_hours = costs.load_hours if is_full else costs.load_shard_hours
    from_store = [failure for failure in failures if not failure.is_by_parity]
    rebuild_hours = parity_hours = 0.0
    if parity is not None and strategy.recovery == "exact":
        rebuild_hours = parity.rebuild_stall * parity.rebuild_hours
        parity_hours = parity.steady_share * job_hours
    return Overhead(
        save_hours=num_saves * strategy.fraction * costs.save_hours,
        load_hours=len(from_store) * load_hours + len(failures) * rebuild_hours,
        lost_computation_hours=sum(failure.lost_computation_hours for failure in failures),
        reschedule_hours=len(failures) * costs.reschedule_hours,
        parity_hours=parity_hours,
    )


def running_pls(
    failures: Sequence[PlayedFailure],
    save_samples: Sequence[int],
    total_samples: int,
    num_shards: int,
) -> list[float]:
    """Return PLS after each failure, if every shard was saved whole at ``save_samples``.

    Args:
        failures: in the order of time.
        save_samples: samples trained at each save, in any order; 0, the start, is implied.
    """
    account = RunningPLS(total_samples, num_shards)
    running = []
    for failure in failures:
        saved = max((at for at in save_samples if at <= failure.num_samples), default=0)
        lost = [failure.num_samples - saved] * len(failure.shards)
        running.append(account.record_failure(lost))
    return running


@dataclass(frozen=True)
class Training:
    """What is trained; the same for every strategy and seed.

    Attributes:
        data: as for :func:`cpr_ext.wings.lab.dlrm.sources.open_source`. The seed of a run makes the
            synthetic samples; real data it shuffles.
        model: preset of the model.
        epochs, batch_size, max_steps: None takes what the data source recommends, all of it.
    """

    data: str = "synthetic"
    model: str = "tiny"
    epochs: int | None = None
    batch_size: int | None = None
    max_steps: int | None = None

    def open(self, seed: int) -> DataSource:
        """Return the data source of a seed; the last one opened is kept."""
        return _open(self.data, self.model, seed)

    def options(self, source: DataSource) -> dict[str, Any]:
        """Those of :class:`TrainOptions` that say how long and how to train."""
        changes = {"epochs": self.epochs, "batch_size": self.batch_size}
        given = {name: value for name, value in changes.items() if value is not None}
        return {
            "settings": replace(source.recommended, **given),
            "max_steps": self.max_steps,
        }

    def clock(self, source: DataSource, job_hours: float) -> EmulatedClock:
        """Return the clock that maps the whole training onto ``job_hours``.

        Raises:
            UsageError: the source does not know its length and no number of steps is given.
        """
        settings = self.options(source)["settings"]
        if (num_samples := end_sample(source, settings, self.max_steps)) is None:
            raise UsageError(
                f"{source.name} is read as a stream, whose length is not known; say how many steps "
                "to train (--steps)"
            )
        return EmulatedClock(job_hours, num_samples, settings.batch_size)


@lru_cache(maxsize=1)
def _open(data: str, model: str, seed: int) -> DataSource:
    return open_source(data, find_preset(model), seed)


def play(
    scenario: Scenario,
    strategy_name: EmulatedStrategyName,
    training: Training,
    seed: int,
    store: Path,
    observe: Callable[[TrainingProgress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Emulate one run; return it as JSON values (docs/emulation.md lists them).

    Every strategy of a seed sees the same data in the same order, the same initial model and the
    same failures. So runs of one seed are compared in pairs.

    Args:
        store: directory for the snapshots, which is emptied before and removed after.

    Raises:
        UsageError: the interval is shorter than half a training step, or the source does not know
            its length.
    """
    source = training.open(seed)
    clock = training.clock(source, scenario.job.total_hours)
    strategy = scenario.strategy(strategy_name)
    has_failures = strategy.recovery != "none"
    drawn = scenario.draw_failures(seed) if has_failures else []
    by_parity: list[DrawnFailure] = []
    if strategy.recovery == "exact":
        by_parity, drawn = divide(drawn, scenario)
    priority = strategy.priority(seed)
    shutil.rmtree(store, ignore_errors=True)
    every_steps = clock.interval_steps(strategy.save_every_hours) if priority is not None else 1
    options = TrainOptions(
        **training.options(source),
        store=store if priority is not None else None,
        priority=priority,
        every_steps=every_steps,
        failures=plan_failures(drawn, clock),
        recovery="partial" if strategy.recovery == "exact" else strategy.recovery,
        num_shards=scenario.job.num_shards,
        seed=seed,
        rebase_after=None,  # each save is charged as `fraction` of all rows, and is that
    )
    try:
        result = Trainer(find_preset(training.model), source, options, observe).run()
    finally:
        shutil.rmtree(store, ignore_errors=True)
    record = summarize_run(scenario, strategy, clock, result, by_parity)
    return {
        "strategy": strategy.name,
        "seed": seed,
        "data": training.data,
        "every_steps": every_steps if priority is not None else None,
        **record,
    }


def plan_failures(
    drawn: Sequence[DrawnFailure], clock: EmulatedClock
) -> tuple[PlannedFailure, ...]:
    """Drawn failures as the trainer's; what strikes within one step loses its shards together."""
    shards_at: dict[int, set[int]] = {}
    for failure in drawn:
        shards_at.setdefault(clock.step_at(failure.hour), set()).update(failure.shards)
    return tuple(
        PlannedFailure(step, tuple(sorted(shards))) for step, shards in sorted(shards_at.items())
    )


def divide(
    drawn: Sequence[DrawnFailure], scenario: Scenario
) -> tuple[list[DrawnFailure], list[DrawnFailure]]:
    """Divide failures: those that parity makes good, and those with all that the store serves."""
    parity = scenario.require_parity()
    groups = PlayedGroups(parity.group_size, unprotected_hours(scenario.costs, parity))
    by_parity, from_store = [], []
    for failure in drawn:
        if served := groups.lose(failure.hour, list(failure.shards)):
            from_store.append(DrawnFailure(failure.hour, tuple(sorted(served))))
        else:
            by_parity.append(failure)
    return by_parity, from_store


def _made_good(failure: DrawnFailure, clock: EmulatedClock) -> PlayedFailure:
    """Return a failure that changes nothing in the model, at the end of its step."""
    samples = min(clock.step_at(failure.hour) * clock.samples_per_step, clock.total_samples)
    return PlayedFailure(
        hour=clock.hours(samples),
        num_samples=samples,
        shards=failure.shards,
        lost_computation_hours=0.0,
        rows_restored=0,
        rows_stale=0,
        recover_seconds=0.0,
        is_by_parity=True,
    )


def summarize_run(
    scenario: Scenario,
    strategy: EmulatedStrategy,
    clock: EmulatedClock,
    result: TrainResult,
    by_parity: Sequence[DrawnFailure] = (),
) -> dict[str, Any]:
    """Return what a training run means on the emulated clock.

    Args:
        by_parity: failures that the run did not see, since parity made them good.
    """
    lossy = [
        PlayedFailure(
            hour=clock.hours(failure["num_samples"]),
            num_samples=failure["num_samples"],
            shards=tuple(failure["shards"]),
            lost_computation_hours=clock.hours(failure["samples_retrained"]),
            rows_restored=failure["rows_restored"],
            rows_stale=failure["rows_stale"],
            recover_seconds=failure["seconds"],
        )
        for failure in result.failures
    ]
    # The base of the first step and the trained model at the end are saved by every job.
    saves = [samples for samples, _ in result.snapshot_log[1:] if samples < clock.total_samples]
    good = [_made_good(failure, clock) for failure in by_parity]
    failures = sorted([*lossy, *good], key=lambda failure: failure.num_samples)
    overhead = charge(
        strategy, len(saves), failures, scenario.costs, scenario.parity, clock.job_hours
    )
    pls: list[float] = []
    if strategy.recovery in ("partial", "exact"):
        whole = whole_saves(strategy, clock)
        pls = running_pls(lossy, whole, clock.total_samples, scenario.job.num_shards)
    return {
        "auc": result.auc,
        "logloss": result.logloss,
        "pls": pls[-1] if pls else 0.0,
        "running_pls": pls,
        "pls_since_any_save": result.pls,
        "overhead": asdict(overhead),
        "overhead_share": overhead.total_hours / clock.job_hours,
        "interval_hours": strategy.interval_hours if result.snapshot_log else None,
        "save_every_hours": strategy.save_every_hours if result.snapshot_log else None,
        "fraction": strategy.fraction,
        "saves": [clock.hours(samples) for samples in saves],
        "failures": [asdict(failure) for failure in failures],
        "job_hours": clock.job_hours,
        "samples": result.samples,
        "steps": result.steps,
        "train_seconds": result.seconds,
        "stall_seconds": result.stall_seconds["total"],
        "bytes_written": result.snapshots["bytes"],
        "warnings": result.warnings,
    }


def whole_saves(strategy: EmulatedStrategy, clock: EmulatedClock) -> list[int]:
    """Return the samples at which a strategy that saves everything every T_save saves.

    The strategies of one target are compared at the PLS of this grid, whichever rows they save
    first: the bytes they write are the same.
    """
    every = clock.interval_steps(strategy.interval_hours)
    step = clock.samples_per_step
    return list(range(step, clock.total_samples, every * step))
