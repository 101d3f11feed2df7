"""Every fault at every call of the scenario, and every power cut: ``make crash-test``.

python -m python_tests.faults crash_test                      all of them
python -m python_tests.faults crash_test --sample 100 --seed 3
python -m python_tests.faults crash_test --resume build/crash --seconds 150   again, until it is 0
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
from python_tests.faults.model import use_precision
from python_tests.faults.notes import NOT_OVER, Clock, add_options, open_notes, still_to_do
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
    parser.add_argument("--precision", default="float32", help="of partial snapshots")
    parser.add_argument("--replay", nargs=2, metavar=("FAULT", "POINT"), help="one try")
    add_options(parser)
    parser.add_argument("--list", action="store_true", help="print the calls and end")
    return parser.parse_args()


class _CrashTest:
    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self._options = options
        use_precision(options.precision)
        self._harness = Harness(directory)
        self._notes = open_notes(options.resume, "crash_test")
        for told in self._notes.told.values():
            self._harness.note_checked(map(bytes.fromhex, told["keys"]))
        # The same run, or the cuts of one call of the campaign would not be those of the next.
        self._recorded = self._harness.record(options.resume)
        self._num_repeats = 0  # cuts that left what was tried before

    def run(self) -> int:
        options = self._options
        if options.list:
            print(*calls_of(self._recorded.log), sep="\n")
            return 0
        started = time.monotonic()
        clock = Clock(options.seconds)
        tasks = self._tasks()
        if options.replay:
            tasks = (task for task in tasks if task[0] == tuple(options.replay))
        elif options.sample:
            tasks = draw(self._tasks, options.sample, options.seed)
        tasks = still_to_do(tasks, self._notes, lambda task: " ".join(task[0]))
        done = run_tries(self._harness, clock.until_over(tasks), options.jobs)
        try:
            for key, found, checked in tqdm(done, unit=" tries", smoothing=0):
                told = {"found": found, "keys": [key.hex() for key in checked]}
                self._notes.add(" ".join(key), told)
                if found:
                    text = "\n    ".join([f"VIOLATION {' '.join(key)}", *found])
                    tqdm.write(text, file=sys.stdout)
        except KeyboardInterrupt:
            clock.is_over = True
        num_failed = self._print(time.monotonic() - started)
        if clock.is_over:
            print("not over: stopped before all was tried")
        return 1 if num_failed or not self._notes.told else NOT_OVER if clock.is_over else 0

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

    def _print(self, seconds: float) -> int:
        """The table; returns how many tries found something."""
        total: Counter[str] = Counter()
        looked: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        for name, told in self._notes.told.items():
            fault = name.split()[0]
            total[fault] += 1
            looked[fault] += len(told["keys"])
            failed[fault] += bool(told["found"])
        print(f"\n{len(calls_of(self._recorded.log))} calls in the scenario")
        print(f"{'fault':10} {'tries':>8} {'states':>8} {'violations':>11}")
        for fault, count in total.items():
            print(f"{fault:10} {count:8} {looked[fault]:8} {failed[fault]:11}")
        sums = f"{total.total():8} {looked.total():8} {failed.total():11}"
        print(f"{'all':10} {sums}   in {seconds:.0f} s")
        print("states: those that differ in a file or in what was promised; each is looked at once")
        if self._num_repeats:
            print(f"{self._num_repeats} more power cuts left what was tried before")
        for name, told in self._notes.told.items():
            if told["found"]:
                print(f"again: python -m python_tests.faults crash_test --replay {name}")
        return failed.total()


if __name__ == "__main__":
    sys.exit(main())
