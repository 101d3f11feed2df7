"""Runs every sabotage: ``python -m python_tests.faults teeth``; each must be found.

With ``--enough 1`` each ends with the first violation.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from python_tests.faults.forks import Task
from python_tests.faults.harness import Harness, fast_directory
from python_tests.faults.sabotage import SABOTAGES, Sabotage, flips
from python_tests.faults.tries import draw, run_tries


def count(
    harness: Harness, tasks: Iterable[Task], jobs: int, enough: int | None = None
) -> tuple[int, int, str]:
    """Violations found, tries, and the first violation; ends early once ``enough`` are found."""
    found, num_tries, first = 0, 0, ""
    for _, told, _ in run_tries(harness, tasks, jobs):
        num_tries += 1
        found += bool(told)
        first = first or (told[0] if told else "")
        if enough is not None and found >= enough:
            break
    return found, num_tries, first


def look(
    sabotage: Sabotage,
    directory: Path,
    *,
    max_tries: int,
    seed: int,
    jobs: int,
    enough: int | None = None,
) -> tuple[int, int, str]:
    """As ``count``, of the code without something."""
    harness = Harness(directory, sabotage.remove)
    recorded = harness.record()
    tasks = draw(lambda: sabotage.tries(harness, recorded, seed), max_tries, seed)
    return count(harness, tasks, jobs, enough)


def main() -> int:
    """0 if every sabotage was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=100, help="of each sabotage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--enough", type=int, help="violations of each sabotage; None: all tries")
    options = parser.parse_args()
    is_missed = False
    with tempfile.TemporaryDirectory(dir=fast_directory(), prefix="cpr-faults-") as directory:
        for sabotage in SABOTAGES:
            found, num_tries, first = look(
                sabotage,
                Path(directory),
                max_tries=options.tries,
                seed=options.seed,
                jobs=options.jobs,
                enough=options.enough,
            )
            is_missed |= found == 0
            _print(sabotage.name, found, num_tries, first)
        harness = Harness(Path(directory))
        recorded = harness.record()
        for checked, name in ((True, "a byte of a row changed"), (False, "... and no checksums")):
            tasks = flips(recorded, options.tries, options.seed, checked=checked)
            found, num_tries, first = count(harness, tasks, options.jobs, options.enough)
            is_missed |= found == 0
            _print(name, found, num_tries, first)
    return int(is_missed)


def _print(name: str, found: int, num_tries: int, first: str) -> None:
    print(f"{name}: found {found} of {num_tries}   {first[:150]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
