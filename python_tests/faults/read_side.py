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

import logging
import random
import re
import sys
import tempfile
from pathlib import Path

from python_tests.faults.campaign import Campaign, parser_of
from python_tests.faults.harness import fast_directory
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
    parser = parser_of(__doc__)
    parser.add_argument("--teeth", type=int, help="plant mistakes, so many tries of each")
    parser.add_argument("--replay", nargs=4, metavar=("ACTION", "FAULT", "CALL", "LASTS"))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=fast_directory(), prefix="cpr-reads-") as directory:
        if options.teeth:
            return int(teeth(Path(directory), options.teeth, options.seed, options.jobs) > 0)
        side, campaign = ReadSide(Path(directory)), Campaign("read_side", options)
        tries = list(side.tries(list(ACTIONS)))
        if options.replay:
            tries = [each for each in tries if str(each) == " ".join(options.replay)]
        elif options.sample:
            tries = random.Random(options.seed).sample(tries, min(options.sample, len(tries)))
        # Survived: the result was right; the others raised StorageError.
        return campaign.run(
            (
                str(tried),
                {
                    "hit": told.hits > 0,
                    "survived": told.hits > 0 and told.is_survived,
                    "found": told.found,
                },
            )
            for tried, told in side.run(campaign.left(tries), jobs=options.jobs)
        )


if __name__ == "__main__":
    sys.exit(main())
