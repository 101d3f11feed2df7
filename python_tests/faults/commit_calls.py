"""What a commit costs: the calls of a run that opens a store and saves to it, counted.

python -m python_tests.faults commit_calls --shards 2
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

import cpr_ext
from python_tests.faults.harness import fast_directory
from python_tests.faults.interposer import Interposer, read_log
from python_tests.helpers import Trained

_NUM_PARTIALS = 3


def calls_by_step(num_shards: int, directory: Path) -> dict[str, Counter[str]]:
    """How often what is called when a store is opened, by a base, and by each partial snapshot."""
    interposer = Interposer()
    interposer.log_to(directory)
    interposer.watch(directory / "store")
    run = Trained(
        directory / "store",
        {"a": (2000, 4), "b": (300, 3)},
        num_shards=num_shards,
        lookups=50,
        schedule=cpr_ext.EverySteps(10**9),
        priority=cpr_ext.AllRows(),
        store=cpr_ext.StoreOptions(None),
        staging=cpr_ext.StagingOptions(num_threads=1),
    )
    names = ["open", "base", *(f"partial {number}" for number in range(_NUM_PARTIALS)), "close"]
    for name in names[1:-1]:
        interposer.mark()
        run.train(2)
        if name != "base":
            run.checkpointer.save("partial")
        run.checkpointer.wait()
    interposer.mark()
    run.checkpointer.close()
    found = [Counter[str]()]
    for entry in read_log(directory):
        if entry.op == "mark":
            found.append(Counter())
        else:
            found[-1][entry.op] += 1
    return dict(zip(names, found, strict=True))


def main() -> int:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=2)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=fast_directory()) as directory:
        for name, calls in calls_by_step(options.shards, Path(directory)).items():
            print(f"{name}: {', '.join(f'{count} {op}' for op, count in sorted(calls.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
