"""Every fault at every call that reads, of all that reads a store: part of ``make crash-test``.

python -m python_tests.faults read_side                      all of them
python -m python_tests.faults read_side --sample 100 --seed 3
python -m python_tests.faults read_side --resume build/crash --seconds 150   again, until it is 0
python -m python_tests.faults read_side --replay export EIO openr:MANIFEST.json:2 stays
python -m python_tests.faults read_side --teeth 100          planted mistakes must be found

No acknowledged state is removed, or replaced by an older one, because something could not be read.
A reader returns what it returns without the fault, or raises StorageError; it leaves no file open
and no thread behind.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from python_tests.faults.harness import fast_directory
from python_tests.faults.notes import NOT_OVER, Clock, add_options, open_notes, still_to_do
from python_tests.faults.read_actions import ACTIONS
from python_tests.faults.read_planted import PLANTED
from python_tests.faults.read_tries import STAYS, ReadSide


def teeth(directory: Path, count: int, seed: int, jobs: int) -> int:
    """How many planted mistakes were missed."""
    missed = 0
    for number, (name, (plant, actions, calls)) in enumerate(PLANTED.items()):
        place = directory / f"teeth-{number}"
        place.mkdir()
        side = ReadSide(place, plant)
        tries = [t for t in side.tries(actions) if re.match(calls, str(t.call))]
        tries = [t for t in tries if t.lasts == STAYS]
        drawn = random.Random(seed).sample(tries, min(count, len(tries)))
        done = list(side.run(drawn, jobs=jobs))
        found = sum(bool(told.found) for _, told in done)
        print(f"{name}: found {found} of {len(done)}", flush=True)
        missed += found == 0
    return missed


def main() -> int:
    """0 if nothing was found wrong, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--sample", type=int, help="so many tries, drawn, instead of all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--teeth", type=int, help="plant mistakes, so many tries of each")
    parser.add_argument("--replay", nargs=4, metavar=("ACTION", "FAULT", "CALL", "LASTS"))
    add_options(parser)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # tell what was found until then
    with tempfile.TemporaryDirectory(dir=fast_directory(), prefix="cpr-reads-") as directory:
        place = Path(directory)
        if options.teeth:
            return int(teeth(place, options.teeth, options.seed, options.jobs) > 0)
        return _campaign(ReadSide(place), options)


def _campaign(side: ReadSide, options: argparse.Namespace) -> int:
    started = time.monotonic()
    notes, clock = open_notes(options.resume, "read_side"), Clock(options.seconds)
    tries = list(side.tries(list(ACTIONS)))
    if options.replay:
        tries = [each for each in tries if str(each) == " ".join(options.replay)]
    elif options.sample:
        tries = random.Random(options.seed).sample(tries, min(options.sample, len(tries)))
    left = list(still_to_do(tries, notes, str))
    done = side.run(clock.until_over(left), jobs=options.jobs)
    try:
        for tried, told in tqdm(done, total=len(left), unit=" tries", smoothing=0):
            notes.add(str(tried), told._asdict())
            if told.found:
                tqdm.write("\n    ".join([f"VIOLATION {tried}", *told.found]), file=sys.stdout)
    except KeyboardInterrupt:
        clock.is_over = True
    count: Counter[str] = Counter()
    hit: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for name, each in notes.told.items():
        action = name.split()[0]
        count[action] += 1
        hit[action] += each["hits"] > 0
        survived[action] += each["hits"] > 0 and each["is_survived"]
        failed[action] += bool(each["found"])
    print(f"\n{'action':14} {'tries':>7} {'hit':>7} {'survived':>9} {'violations':>11}")
    for action, number in count.items():
        print(f"{action:14} {number:7} {hit[action]:7} {survived[action]:9} {failed[action]:11}")
    totals = [sum(counter.values()) for counter in (count, hit, survived, failed)]
    print("all            {:7} {:7} {:9} {:11}".format(*totals), end="   ")
    print(f"in {time.monotonic() - started:.0f} s")
    print("survived: the result was right; the others raised StorageError")
    if clock.is_over:
        print(f"not over: {len(tries)} in all")
    return 1 if failed.total() or not count else NOT_OVER if clock.is_over else 0


if __name__ == "__main__":
    sys.exit(main())
