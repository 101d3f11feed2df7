"""Every byte of every file of a small store flipped; files cut, deleted, swapped, replaced.

    python -m python_tests.faults.damage             all of it, a few minutes; make damage-test
    python -m python_tests.faults.damage --every 50  each 50th byte

Each damage must be found. ``on_damage="raise"`` raises, names the file and changes nothing. Falling
back gives each row its newest undamaged state; the report lists exactly which rows are older, by
how much, and which are missing. The one file without a checksum is ``LOCK``, of which recovery
reads nothing.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

from python_tests.faults.damage_cases import cases, check_case
from python_tests.faults.damage_flips import flip_every_byte
from python_tests.faults.damage_scene import (
    Scene,
    Tally,
)


def _flip_part(arguments: tuple) -> dict:
    seed, part, parts, every = arguments
    with tempfile.TemporaryDirectory() as place:
        scene = Scene(Path(place) / "scene", seed)
        return flip_every_byte(scene, Path(place) / "copy", part, parts, every)


def main() -> int:
    """Print the counts; 1 if anything went undetected or was reported wrongly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="flip each N-th byte only")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, default=0, help="of the store")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        work = [(options.seed, n, options.jobs, options.every) for n in range(options.jobs)]
        parts = pool.map(_flip_part, work)
    flips = Tally()
    print(f"{'bytes flipped in':40} {'bytes':>8} {'detected':>9} {'harmless':>9} {'faults':>7}")
    for name in parts[0]:
        one = Tally()
        for part in parts:
            one.add(part[name])
        flips.add(one)
        print(f"{name:40} {one.tried:8} {one.detected:9} {one.harmless:9} {len(one.faults):7}")
    files = Tally()
    with tempfile.TemporaryDirectory() as place:
        scene = Scene(Path(place) / "scene", options.seed)
        sibling = Scene(Path(place) / "sibling", options.seed + 1)
        for case in cases(scene, sibling):
            check_case(scene, case, Path(place) / "copy", files)
    for what, tally in (("all bytes flipped", flips), ("files cut, deleted, swapped...", files)):
        undetected = len(tally.faults)
        print(f"{what:40} {tally.tried:8} {tally.detected:9} {tally.harmless:9} {undetected:7}")
    for fault in (flips.faults + files.faults)[:20]:
        print("FAULT", fault)
    print(f"{time.monotonic() - started:.0f} s; harmless: LOCK, of which nothing is read")
    return 1 if flips.faults or files.faults else 0


if __name__ == "__main__":
    sys.exit(main())
