"""Every fault at every call of the scenario, and every power cut: ``make crash-test``.

python -m python_tests.faults crash_test                      all of them
python -m python_tests.faults crash_test --sample 100 --seed 3
python -m python_tests.faults crash_test --replay EIO fsync:store/dense:2
python -m python_tests.faults crash_test --replay cut 120.4:drawn1
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from python_tests.faults.forks import Task
from python_tests.faults.harness import Harness, fast_directory
from python_tests.faults.interposer import calls_of
from python_tests.faults.tries import (
    CUT,
    ERROR_AND_CUT,
    KINDS,
    cut_tries,
    draw,
    error_and_cut_tries,
    fault_tries,
    run_tries,
)

REORDERINGS = 4


def main() -> int:
    """0 if nothing was found wrong, else 1."""
    options = _parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # tell what was found until then
    with tempfile.TemporaryDirectory(dir=fast_directory(), prefix="cpr-faults-") as directory:
        return _CrashTest(Path(directory), options).run()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="tries at a time")
    parser.add_argument("--sample", type=int, help="so many tries, drawn, instead of all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and of what a cut keeps")
    parser.add_argument("--reorderings", type=int, default=REORDERINGS, help="drawn per power cut")
    parser.add_argument("--only", help="only these faults, separated by commas")
    parser.add_argument("--replay", nargs=2, metavar=("FAULT", "POINT"), help="one try")
    parser.add_argument("--list", action="store_true", help="print the calls and end")
    return parser.parse_args()


class _CrashTest:
    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self._options = options
        self._harness = Harness(directory)
        self._recorded = self._harness.record()
        self._num_repeats = 0  # cuts that left what was tried before

    def run(self) -> int:
        options = self._options
        if options.list:
            print(*calls_of(self._recorded.log), sep="\n")
            return 0
        started = time.monotonic()
        expected = options.sample or (1 if options.replay else sum(1 for _ in self._tasks()))
        tasks = self._tasks()
        if options.replay:
            tasks = (task for task in tasks if task[0] == tuple(options.replay))
        elif options.sample:
            tasks = draw(self._tasks, options.sample, options.seed)
        total: Counter[str] = Counter()
        looked: Counter[str] = Counter()
        failed: list[tuple[str, str]] = []
        done = run_tries(self._harness, tasks, options.jobs)
        is_stopped = False
        try:
            for key, found, checked in tqdm(done, total=expected, unit=" tries", smoothing=0):
                total[key[0]] += 1
                looked[key[0]] += checked
                if found:
                    failed.append(key)
                    text = "\n    ".join([f"VIOLATION {key[0]} {key[1]}", *found])
                    tqdm.write(text, file=sys.stdout)
        except KeyboardInterrupt:
            is_stopped = True
            print(f"\nstopped after {total.total()} of {expected} tries")
        self._print(total, looked, failed, time.monotonic() - started)
        return 1 if failed or is_stopped or not total else 0

    def _tasks(self) -> Iterator[Task]:
        options = self._options
        kinds = options.only.split(",") if options.only else KINDS
        if options.replay:
            kinds = [options.replay[0]]
        yield from fault_tries(self._harness, self._recorded, kinds)
        self._num_repeats = 0
        if CUT in kinds:
            yield from cut_tries(
                self._harness,
                self._recorded,
                reorderings=options.reorderings,
                seed=options.seed,
                on_repeat=self._count_repeat,
            )

        if ERROR_AND_CUT in kinds:
            seed = options.seed
            yield from error_and_cut_tries(self._harness, self._recorded, seed=seed)

    def _count_repeat(self) -> None:
        self._num_repeats += 1

    def _print(
        self,
        total: Counter[str],
        looked: Counter[str],
        failed: list[tuple[str, str]],
        seconds: float,
    ) -> None:
        found = Counter(fault for fault, _ in failed)
        print(f"\n{len(calls_of(self._recorded.log))} calls in the scenario")
        print(f"{'fault':10} {'tries':>8} {'states':>8} {'violations':>11}")
        for fault, count in total.items():
            print(f"{fault:10} {count:8} {looked[fault]:8} {found[fault]:11}")
        sums = f"{total.total():8} {looked.total():8} {found.total():11}"
        print(f"{'all':10} {sums}   in {seconds:.0f} s")
        print("states: those that differ in a file or in what was promised; each is looked at once")
        if self._num_repeats:
            print(f"{self._num_repeats} more power cuts left what was tried before")
        for fault, point in failed:
            print(f"again: python -m python_tests.faults crash_test --replay {fault} {point}")


if __name__ == "__main__":
    sys.exit(main())
