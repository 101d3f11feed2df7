"""One process that has imported everything forks a child per try; it never starts a thread."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """How a child ended: what its function returned, or why it did not; and what it printed."""

    result: Any
    error: str
    signal: int


def start(action: Callable[[], Any], output: Path) -> int:
    """Fork a child that calls ``action`` and leaves its result in ``output``; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with output.with_suffix(".err").open("w") as errors:
            os.dup2(errors.fileno(), 2)
        try:
            told = (action(), "")
        except BaseException:
            told = (None, traceback.format_exc())
        output.write_bytes(pickle.dumps(told))
        os._exit(0)
    finally:
        os._exit(1)


def finish(pid: int, status: int, output: Path) -> Ended:
    """What a child that was waited for has told."""
    if os.WIFSIGNALED(status):
        return Ended(None, f"killed by signal {os.WTERMSIG(status)}", os.WTERMSIG(status))
    if status != 0:
        return Ended(None, output.with_suffix(".err").read_text()[-2000:], 0)
    return Ended(*pickle.loads(output.read_bytes()), 0)


def call(action: Callable[[], Any], output: Path, timeout_seconds: float) -> Ended:
    """Fork, wait, and tell."""
    pid = start(action, output)
    deadline = time.monotonic() + timeout_seconds
    pause = 0.001
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return finish(pid, status, output)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Ended(None, f"it did not end within {timeout_seconds} seconds", 0)
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


Task = tuple[Any, Callable[[Path], Any]]


def run_all(
    tasks: Iterable[Task], directory: Path, *, jobs: int, timeout_seconds: float = 180
) -> Iterator[tuple[Any, Ended]]:
    """Do each task in a child and a directory of its own, ``jobs`` at a time.

    Yields the task's key and how it ended, in the order of ending.
    """
    waiting = iter(tasks)
    running: dict[int, tuple[Any, tempfile.TemporaryDirectory[str], float]] = {}
    is_over = False
    while True:
        while not is_over and len(running) < jobs:
            try:
                key, action = next(waiting)
            except StopIteration:
                is_over = True
                break
            place = tempfile.TemporaryDirectory(dir=directory, ignore_cleanup_errors=True)
            here = Path(place.name)
            pid = start(lambda action=action, here=here: action(here), here / "result")
            running[pid] = (key, place, time.monotonic() + timeout_seconds)
        if not running:
            return
        for pid, (key, place, deadline) in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done and time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, 0)
            if done:
                del running[pid]
                yield key, finish(pid, status, Path(place.name) / "result")
                place.cleanup()
                break
        else:
            time.sleep(0.002)
