"""All tries of a kind by name, and some of them drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from python_tests.faults.forks import Task, run_all
from python_tests.faults.harness import Harness, Recorded
from python_tests.faults.interposer import FAULTS, Call, calls_of, faults_of
from python_tests.faults.power_cut import cuts

CUT = "cut"
ERROR_AND_CUT = "EIO+cut"
KINDS = (*FAULTS, CUT, ERROR_AND_CUT)
_SYNCS = ("fsync", "rename")
MakeTasks = Callable[[], Iterator[Task]]


def fault_tries(
    harness: Harness,
    recorded: Recorded,
    kinds: Iterable[str],
    concerns: Callable[[Call], bool] = lambda call: True,
) -> Iterator[Task]:
    """Each of these faults at each call that it ``concerns``."""
    calls = [call for call in calls_of(recorded.log) if concerns(call)]
    for fault in FAULTS:
        for call in calls:
            if fault in kinds and fault in faults_of(call):
                action = partial(harness.try_fault, fault, call, recorded.outcome)
                yield (fault, str(call)), action


def cut_tries(
    harness: Harness,
    recorded: Recorded,
    *,
    reorderings: int,
    seed: int,
    concerns: Callable[[Call], bool] = lambda call: True,
) -> Iterator[Task]:
    """A power cut after each call that it ``concerns``, and what it may leave, once each."""
    calls = calls_of(recorded.log)
    found = cuts(
        recorded.log,
        recorded.promise_at,
        reorderings=reorderings,
        seed=seed,
        concerns=lambda num_calls: num_calls == 0 or concerns(calls[num_calls - 1]),
    )
    for cut, tree in found:
        if tree is not None:
            yield (CUT, str(cut)), partial(harness.try_cut, cut, tree, recorded)


def error_and_cut_tries(harness: Harness, recorded: Recorded, *, seed: int) -> Iterator[Task]:
    """EIO at each call that is to make something durable, then power cuts at drawn calls."""
    for call in calls_of(recorded.log):
        if call.op in _SYNCS:
            action = partial(harness.try_error_and_cuts, call, f"{seed}-{call}")
            yield (ERROR_AND_CUT, str(call)), action


def draw(make_tasks: MakeTasks, count: int, seed: int) -> Iterator[Task]:
    """``count`` of the tasks. Made twice: the trees of all power cuts would not fit in memory."""
    names = [key for key, _ in make_tasks()]
    drawn = set(random.Random(seed).sample(names, min(count, len(names))))
    return (task for task in make_tasks() if task[0] in drawn)


def run_tries(
    harness: Harness, tasks: Iterable[Task], jobs: int
) -> Iterator[tuple[tuple[str, str], list[str], list[bytes]]]:
    """(fault, point) of each try, what it found, and keys of the stores it found right."""
    for key, ended in run_all(tasks, harness.directory, jobs=jobs):
        if ended.error:
            yield key, [ended.error], []
        else:
            found, checked = ended.result
            harness.note_checked(checked)
            yield key, found, checked
