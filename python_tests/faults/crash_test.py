"""Every fault at every call of the scenario, and every power cut: ``make crash-test``.

python -m python_tests.faults crash_test                      all of them
python -m python_tests.faults crash_test --sample 100 --seed 3
python -m python_tests.faults crash_test --resume build/crash --seconds 150   again, until it is 0
python -m python_tests.faults crash_test --replay EIO fsync:store/dense:2
python -m python_tests.faults crash_test --replay cut 120.4:drawn1
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from python_tests.faults.campaign import Campaign, parser_of
from python_tests.faults.forks import Task
from python_tests.faults.harness import Harness, Recorded, fast_directory
from python_tests.faults.interposer import calls_of
from python_tests.faults.model import use_precision
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


def main() -> int:
    """0 if nothing was found wrong, else 1."""
    parser = parser_of(__doc__)
    parser.add_argument("--reorderings", type=int, default=4, help="drawn per power cut")
    parser.add_argument("--only", help="only these faults, separated by commas")
    parser.add_argument("--precision", default="float32", help="of partial snapshots")
    parser.add_argument("--replay", nargs=2, metavar=("FAULT", "POINT"), help="one try")
    parser.add_argument("--list", action="store_true", help="print the calls and end")
    options = parser.parse_args()
    use_precision(options.precision)
    with tempfile.TemporaryDirectory(dir=fast_directory(), prefix="cpr-faults-") as directory:
        harness, campaign = Harness(Path(directory)), Campaign("crash_test", options)
        # States: those that differ in a file or in what was promised; each is looked at once.
        for told in campaign.told.values():
            harness.note_checked(map(bytes.fromhex, told["states"]))
        # The same run, or the cuts of one call of the campaign would not be those of the next.
        recorded = harness.record(options.resume)
        if options.list:
            print(*calls_of(recorded.log), sep="\n")
            return 0
        make = partial(_tasks, harness, recorded, options)
        tasks = draw(make, options.sample, options.seed) if options.sample else make()
        if options.replay:
            tasks = (task for task in make() if task[0] == tuple(options.replay))
        left = campaign.left(tasks, lambda task: " ".join(task[0]))
        done = run_tries(harness, left, options.jobs)
        return campaign.run(
            (" ".join(key), {"states": [each.hex() for each in checked], "found": found})
            for key, found, checked in done
        )


def _tasks(harness: Harness, recorded: Recorded, options: argparse.Namespace) -> Iterator[Task]:
    kinds = options.only.split(",") if options.only else KINDS
    if options.replay:
        kinds = [options.replay[0]]
    yield from fault_tries(harness, recorded, kinds)
    how = {"reorderings": options.reorderings, "seed": options.seed}
    if CUT in kinds:
        yield from cut_tries(harness, recorded, **how)
    if ERROR_AND_CUT in kinds:
        yield from error_and_cut_tries(harness, recorded, seed=options.seed)


if __name__ == "__main__":
    sys.exit(main())
