"""Strategies and seeds of a scenario, side by side; continues what was begun."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.dlrm.batch import DataSource
from cpr_ext.wings.lab.dlrm.presets import find_preset
from cpr_ext.wings.lab.emulation.campaign import Campaign, locked, open_campaign
from cpr_ext.wings.lab.emulation.clock import EmulatedClock
from cpr_ext.wings.lab.emulation.machine import describe_machine
from cpr_ext.wings.lab.emulation.run_strategy import Training
from cpr_ext.wings.lab.emulation.scenario import Scenario
from cpr_ext.wings.lab.emulation.strategies import EmulatedStrategyName
from cpr_ext.wings.lab.emulation.workers import play_all, workers_that_fit

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Standing:
    """Progress of a campaign; ``message`` reports the end of a run."""

    runs: int
    total_runs: int
    message: str = ""


def emulate(
    scenario: Scenario,
    training: Training,
    directory: Path,
    *,
    strategies: Sequence[EmulatedStrategyName],
    seeds: Sequence[int],
    num_workers: int | None = None,
    observe: Callable[[Standing], None] = lambda standing: None,
) -> Campaign:
    """Play what is not yet played of ``strategies`` and ``seeds``, each run in a worker process.

    Args:
        directory: keeps the finished runs; a killed emulation resumes from there.
        num_workers: None: as many as fit the machine's cores and memory.

    Raises:
        UsageError: the directory belongs to another scenario or is in use, or a run cannot be
            played (its interval is shorter than a training step).
        DataError: the data, or a file of the directory, cannot be read.
        RunError: a run failed; the finished ones are kept.
    """
    source = training.open(seeds[0])
    clock = training.clock(source, scenario.job.total_hours)
    with locked(directory):
        config = {"scenario": asdict(scenario), "training": asdict(training)}
        campaign = open_campaign(directory, config)
        for name in strategies:
            _check_playable(scenario, name, clock)
        _note(campaign, scenario)
        missing = campaign.missing(strategies, seeds)
        kept = f"{len(campaign.runs)} finished runs are kept" if campaign.runs else ""
        observe(Standing(0, len(missing), kept))
        workers = num_workers or workers_that_fit(_table_bytes(source, training))
        played = play_all(campaign, scenario, training, missing, workers)
        for done, (key, run) in enumerate(played, start=1):
            campaign.add(key, run)
            text = (
                f"{key.name}: AUC {run['auc']:.4f}, overhead {100 * run['overhead_share']:.2f} %, "
                f"PLS {run['pls']:.4f}"
            )
            observe(Standing(done, len(missing), text))
    return campaign


def _check_playable(scenario: Scenario, name: EmulatedStrategyName, clock: EmulatedClock) -> None:
    strategy = scenario.strategy(name)
    if strategy.recovery == "none":
        return
    try:
        clock.interval_steps(strategy.save_every_hours)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def _note(campaign: Campaign, scenario: Scenario) -> None:
    told = campaign.facts
    told["played"] = asdict(scenario)
    told.setdefault("commands", []).append(
        {"command": shlex.join(["cpr", *sys.argv[1:]]), "machine": describe_machine()}
    )
    campaign.save()


def _table_bytes(source: DataSource, training: Training) -> int:
    return sum(source.num_embeddings) * find_preset(training.model).embedding_dim * _FLOAT_BYTES
