"""Runs side by side, each worker a process with one thread of torch."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any

from cpr_ext.errors import CprError, UsageError
from cpr_ext.wings.lab.emulation.campaign import Campaign, RunKey
from cpr_ext.wings.lab.emulation.machine import available_cores, available_memory_bytes
from cpr_ext.wings.lab.emulation.run_strategy import Training, play
from cpr_ext.wings.lab.emulation.scenario import Scenario

# What a process takes before the model: the interpreter, torch, staging slots.
_PROCESS_BYTES = 600 << 20
# Weights, their gradient or optimizer state, SCAR's copy, and as much for the data.
_BYTES_PER_TABLE_BYTE = 4


class RunError(CprError):
    """A run could not be played."""


def workers_that_fit(table_bytes: int) -> int:
    """Return how many runs fit the machine's free memory and the cores of this process.

    Raises:
        UsageError: not even one.
    """
    run_bytes = _PROCESS_BYTES + _BYTES_PER_TABLE_BYTE * table_bytes
    fitting = available_memory_bytes() // run_bytes
    if fitting < 1:
        raise UsageError(
            f"a run takes about {run_bytes >> 20:,} MiB, and {available_memory_bytes() >> 20:,} "
            "are free; choose a smaller --model"
        )
    return min(fitting, available_cores())


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
