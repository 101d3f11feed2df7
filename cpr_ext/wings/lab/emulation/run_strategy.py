"""Play one strategy and seed: train for real, fail as drawn, recover by the rules, charge."""

from __future__ import annotations

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
from cpr_ext.wings.lab.dlrm.trainer import Trainer, TrainingProgress, TrainOptions, TrainResult
from cpr_ext.wings.lab.emulation.clock import EmulatedClock
from cpr_ext.wings.lab.emulation.cost_accounting import PlayedFailure, charge, running_pls
from cpr_ext.wings.lab.emulation.parity_groups import PlayedGroups
from cpr_ext.wings.lab.emulation.scenario import DrawnFailure, Scenario
from cpr_ext.wings.lab.emulation.strategies import EmulatedStrategy, EmulatedStrategyName
from cpr_ext.wings.policy.parity import unprotected_hours


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
            "settings": replace(source.recommended, **given),  # type: ignore[arg-type]
            "max_steps": self.max_steps,
        }

    def clock(self, source: DataSource, job_hours: float) -> EmulatedClock:
        """Return the clock that maps the whole training onto ``job_hours``.

        Raises:
            UsageError: the source does not know its length and no number of steps is given.
        """
        settings = self.options(source)["settings"]
        limits = []
        if source.num_train_samples is not None:
            limits.append(settings.epochs * source.num_train_samples)
        if self.max_steps is not None:
            limits.append(self.max_steps * settings.batch_size)
        if not limits:
            raise UsageError(
                f"{source.name} is read as a stream, whose length is not known; say how many steps "
                "to train (--steps)"
            )
        return EmulatedClock(job_hours, min(limits), settings.batch_size)


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
        "failures": [failure.to_plain() for failure in failures],
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
