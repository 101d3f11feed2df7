"""Every fault at every call of the scenario, and every power cut: ``make crash-test``.

    python -m python_tests.faults.crash_test                      all of them
    python -m python_tests.faults.crash_test --sample 100 --seed 3
    python -m python_tests.faults.crash_test --replay EIO fsync:store/dense:2
    python -m python_tests.faults.crash_test --replay cut 120:drawn1
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from python_tests.faults import forks, interposer

REORDERINGS = 4


def main(arguments: list[str] | None = None) -> int:
    """0 if nothing was found wrong, 1 if something was, 2 if it cannot run here."""
    options = _parse(arguments)
    try:
        interposer.Interposer()
    except interposer.Unavailable:
        return _run_preloaded(arguments if arguments is not None else sys.argv[1:])
    from python_tests.faults.harness import fast_directory

    with tempfile.TemporaryDirectory(dir=fast_directory(), prefix="cpr-faults-") as directory:
        return _CrashTest(Path(directory), options).run()


def _run_preloaded(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as directory:
        try:
            library = interposer.build(Path(directory))
        except interposer.Unavailable as error:
            print(f"cannot run here: {error}", file=sys.stderr)
            return 2
        command = [sys.executable, "-m", "python_tests.faults.crash_test", *arguments]
        return subprocess.run(command, env=interposer.environment(library)).returncode


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="tries at a time")
    parser.add_argument("--sample", type=int, help="so many tries, drawn, instead of all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and of what a cut keeps")
    parser.add_argument("--reorderings", type=int, default=REORDERINGS, help="drawn per power cut")
    parser.add_argument("--only", help="only these faults, separated by commas")
    parser.add_argument("--replay", nargs=2, metavar=("FAULT", "POINT"), help="one try")
    parser.add_argument("--list", action="store_true", help="print the calls and end")
    return parser.parse_args(arguments)


class _CrashTest:
    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        from python_tests.faults.harness import Harness

        self._directory = directory
        self._options = options
        self._harness = Harness(directory)
        self._recorded = self._harness.record()
        self._calls = interposer.calls_of(self._recorded.log)
        self._repeats: Counter[str] = Counter()  # cuts that left a tree seen before

    def run(self) -> int:
        options = self._options
        if options.list:
            print(*self._calls, sep="\n")
            return 0
        started = time.monotonic()
        tries = self._tries()
        if options.replay:
            tries = (t for t in tries if t[0] == tuple(options.replay))
        elif options.sample:
            # Drawn by name first: the trees of all power cuts would not fit in memory.
            names = [key for key, _ in tries]
            drawn = random.Random(options.seed).sample(names, min(options.sample, len(names)))
            tries = (t for t in self._tries() if t[0] in set(drawn))
        total: Counter[str] = Counter()
        failed: dict[tuple[str, str], list[str]] = {}
        for key, ended in forks.run_all(tries, self._directory, jobs=options.jobs):
            total[key[0]] += 1
            if found := [ended.error] if ended.error else ended.result:
                failed[key] = found
                print(f"\nVIOLATION {key[0]} {key[1]}", *found, sep="\n    ", flush=True)
            self._progress(total, failed, started)
        self._print(total, failed, time.monotonic() - started)
        return 1 if failed or not total else 0

    def _tries(self) -> Iterator[tuple[Any, Any]]:
        only = set(self._options.only.split(",")) if self._options.only else None
        harness, recorded = self._harness, self._recorded
        for fault in interposer.FAULTS:
            for call in self._calls:
                if fault in interposer.faults_of(call) and (only is None or fault in only):
                    action = partial(harness.try_fault, fault, call, recorded.outcome)
                    yield (fault, str(call)), action
        if only is None or "cut" in only:
            yield from self._cuts()

    def _cuts(self) -> Iterator[tuple[Any, Any]]:
        from python_tests.faults.power_cut import cuts

        found = cuts(
            self._recorded.log,
            self._recorded.promise_at,
            reorderings=self._options.reorderings,
            seed=self._options.seed,
        )
        for cut, tree in found:
            if tree is None:
                self._repeats["cut"] += 1
            else:
                action = partial(self._harness.try_cut, cut, tree, self._recorded)
                yield ("cut", str(cut)), action

    def _progress(self, total: Counter[str], failed: dict[Any, Any], started: float) -> None:
        if sys.stderr.isatty():
            seconds = time.monotonic() - started
            text = f"\r{total.total()} tries, {len(failed)} violations, {seconds:.0f} s "
            print(text, end="", file=sys.stderr, flush=True)

    def _print(self, total: Counter[str], failed: dict[Any, Any], seconds: float) -> None:
        found = Counter(fault for fault, _ in failed)
        print(f"\n{len(self._calls)} calls in the scenario")
        print(f"{'fault':10} {'points':>8} {'violations':>11}")
        for fault, count in total.items():
            print(f"{fault:10} {count:8} {found[fault]:11}")
        print(f"{'all':10} {total.total():8} {found.total():11}   in {seconds:.0f} s")
        if self._repeats["cut"]:
            print(f"{self._repeats['cut']} more power cuts left a state that was checked before")
        for fault, point in failed:
            print(f"again: python -m python_tests.faults.crash_test --replay {fault} {point}")


if __name__ == "__main__":
    sys.exit(main())
