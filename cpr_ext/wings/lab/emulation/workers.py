"""Runs side by side, each worker a process with one thread of torch."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from cpr_ext.errors import CprError, UsageError
from cpr_ext.wings.lab.emulation.campaign import RunKey
from cpr_ext.wings.lab.emulation.machine import available_cores, available_memory_bytes
from cpr_ext.wings.lab.emulation.run_strategy import Training, play
from cpr_ext.wings.lab.emulation.scenario import Scenario

# What a process takes before the model: the interpreter, torch, staging slots.
_PROCESS_BYTES = 600 << 20
# Weights, their gradient or optimizer state, SCAR's copy, and as much for the data.
_BYTES_PER_TABLE_BYTE = 4
_SECONDS_BETWEEN_MESSAGES = 0.2


@dataclass(frozen=True)
class Task:
    """A run to be played."""

    key: RunKey
    store: Path


@dataclass(frozen=True)
class Moved:
    """Training of a run has come to ``num_samples``."""

    key: RunKey
    num_samples: int


@dataclass(frozen=True)
class Finished:
    """A run is over."""

    key: RunKey
    run: dict[str, Any]


@dataclass(frozen=True)
class _Failed:
    text: str
    is_ours: bool


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
    scenario: Scenario, training: Training, tasks: Sequence[Task], num_workers: int
) -> Iterator[Moved | Finished]:
    """Run every task, report the progress of training, and yield each run when it is over.

    A worker whose parent is gone ends at its next message; a parent that stops iterating ends its
    workers.

    Raises:
        RunError: a run failed, or its process died.
        UsageError: a run cannot be played in this scenario.
    """
    context = multiprocessing.get_context("spawn")
    left = list(reversed(tasks))
    at_work: dict[Connection, RunKey] = {}
    workers = []
    try:
        for _ in range(min(num_workers, len(tasks))):
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=_work, args=(theirs, scenario, training), name="cpr-emulate", daemon=True
            )
            worker.start()
            theirs.close()
            workers.append(worker)
            at_work[ours] = _hand_out(ours, left)
        while at_work:
            for pipe in wait(list(at_work)):
                assert isinstance(pipe, Connection)
                message = _receive(pipe, at_work[pipe])
                yield message
                if isinstance(message, Finished):
                    del at_work[pipe]
                    if left:
                        at_work[pipe] = _hand_out(pipe, left)
                    else:
                        pipe.close()
    finally:
        for worker in workers:
            if worker.is_alive() and at_work:
                worker.terminate()
            worker.join(timeout=10)


def _hand_out(pipe: Connection, left: list[Task]) -> RunKey:
    task = left.pop()
    pipe.send(task)
    return task.key


def _receive(pipe: Connection, key: RunKey) -> Moved | Finished:
    try:
        message = pipe.recv()
    except (EOFError, ConnectionError):
        raise RunError(
            f"the process of run {key.name} died; was it killed for want of memory? Finished runs "
            "are kept: the same command, perhaps with --jobs 1, continues"
        ) from None
    if isinstance(message, _Failed):
        if message.is_ours:
            raise UsageError(f"run {key.name}: {message.text}")
        raise RunError(f"run {key.name} failed: {message.text}")
    assert isinstance(message, Moved | Finished)
    return message


def _work(pipe: Connection, scenario: Scenario, training: Training) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        while True:
            task = pipe.recv()
            pipe.send(_play(pipe.send, scenario, training, task))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return  # no more work, or nobody is waiting for it


def _play(
    send: Callable[[Any], None], scenario: Scenario, training: Training, task: Task
) -> Finished | _Failed:
    last_sent = time.monotonic()

    def observe(progress: Any) -> None:
        nonlocal last_sent
        now = time.monotonic()
        if now - last_sent > _SECONDS_BETWEEN_MESSAGES:
            last_sent = now
            try:
                send(Moved(task.key, progress.num_samples))
            except ConnectionError:
                os._exit(1)  # nobody waits for this run; tidying up would take cores and disk

    try:
        run = play(scenario, task.key.strategy, training, task.key.seed, task.store, observe)
    except UsageError as error:
        return _Failed(str(error), is_ours=True)
    except CprError as error:
        return _Failed(str(error), is_ours=False)
    except Exception:
        return _Failed(traceback.format_exc(), is_ours=False)
    return Finished(task.key, run)
