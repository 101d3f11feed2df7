"""Strategies and seeds of a scenario, side by side; continues what was begun."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from cpr_ext.errors import CprError, UsageError
from cpr_ext.wings.lab.emulation.campaign import Campaign, RunKey, locked, open_campaign
from cpr_ext.wings.lab.emulation.machine import available_cores, describe_machine
from cpr_ext.wings.lab.emulation.run_strategy import EmulatedClock, Training, play
from cpr_ext.wings.lab.emulation.scenario import EmulatedStrategyName, Scenario


class RunError(CprError):
    """A run could not be played."""


def play_all(
    campaign: Campaign,
    scenario: Scenario,
    training: Training,
    keys: Sequence[RunKey],
    num_workers: int,
) -> Iterator[tuple[RunKey, dict[str, Any]]]:
    """Play runs, and yield each when it is over. A worker whose parent is gone ends.

    Raises:
        RunError: a run failed, or its process died.
        UsageError: a run cannot be played in this scenario.
    """
    if not keys:
        return
    pool = ProcessPoolExecutor(
        min(num_workers, len(keys)), multiprocessing.get_context("spawn"), initializer=_begin
    )
    try:
        runs = {
            pool.submit(
                play, scenario, key.strategy, training, key.seed, campaign.store_of(key)
            ): key
            for key in keys
        }
        for run in as_completed(runs):
            key = runs[run]
            try:
                yield key, run.result()
            except BrokenProcessPool:
                raise RunError(
                    "the process of a run died; was it killed for want of memory? Finished runs "
                    "are kept: the same command, perhaps with --jobs 1, continues"
                ) from None
            except UsageError as error:
                raise UsageError(f"run {key.name}: {error}") from error
            except Exception as error:
                raise RunError(f"run {key.name} failed: {error}") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    import torch

    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)  # nobody waits for this run; tidying up would take cores and disk

    threading.Thread(target=end_with_parent, daemon=True).start()


def emulate(
    scenario: Scenario,
    training: Training,
    directory: Path,
    *,
    strategies: Sequence[EmulatedStrategyName],
    seeds: Sequence[int],
    num_workers: int | None = None,
    observe: Callable[[int, int, str], None] = lambda done, total, message: None,
) -> Campaign:
    """Play what is not yet played of ``strategies`` and ``seeds``, each run in a worker process.

    Args:
        directory: keeps the finished runs; a killed emulation resumes from there.
        num_workers: None: as many as cores.
        observe: called with the runs that are over, all runs, and a message about the last one.

    Raises:
        UsageError: the directory belongs to another scenario or is in use, or a run cannot be
            played (its interval is shorter than a training step).
        DataError: the data, or a file of the directory, cannot be read.
        RunError: a run failed; the finished ones are kept.
    """
    clock = training.clock(training.open(seeds[0]), scenario.job.total_hours)
    with locked(directory):
        config = {"scenario": asdict(scenario), "training": asdict(training)}
        campaign = open_campaign(directory, config)
        for name in strategies:
            _check_playable(scenario, name, clock)
        _note(campaign, scenario)
        missing = campaign.missing(strategies, seeds)
        kept = f"{len(campaign.runs)} finished runs are kept" if campaign.runs else ""
        observe(0, len(missing), kept)
        workers = num_workers or available_cores()
        played = play_all(campaign, scenario, training, missing, workers)
        for done, (key, run) in enumerate(played, start=1):
            campaign.add(key, run)
            text = (
                f"{key.name}: AUC {run['auc']:.4f}, overhead {100 * run['overhead_share']:.2f} %, "
                f"PLS {run['pls']:.4f}"
            )
            observe(done, len(missing), text)
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
