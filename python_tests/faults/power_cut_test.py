"""Real power cuts: ``make power-cut-test``. Needs Linux, root, loop devices and ext4.

python -m python_tests.faults power_cut_test --cuts 50      of each journal mode and way of writing
python -m python_tests.faults power_cut_test --resume build/cuts --seconds 150   until it is 0
python -m python_tests.faults power_cut_test --replay writeback direct 17
python -m python_tests.faults power_cut_test --teeth 20     missing syncs must be found

The training run of the other faults saves to an ext4 on a loop device, which is stopped at a random
moment; then the run is killed, the file system is mounted again, and a fresh process must find what
had been promised until then.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cpr_ext.saving import segment_capture
from cpr_ext.storage.segment_format import ALIGNMENT
from python_tests.faults import forks, scenario
from python_tests.faults.campaign import Campaign, parser_of
from python_tests.faults.harness import Prepare, fast_directory, warm_up
from python_tests.faults.interposer import Interposer
from python_tests.faults.invariant import check_stores
from python_tests.faults.journal import Journal, States, read_lines
from python_tests.faults.loop_disk import (
    JOURNAL_MODES,
    LoopDisk,
    NoDiskError,
    enter_own_mounts,
    probe,
)
from python_tests.faults.sabotage import SABOTAGES, no_sync
from python_tests.faults.scenario import Watcher, run

_TIMEOUT_SECONDS = 120.0
DIRECT, BUFFERED = "direct", "buffered"
# ext4 commits the entries of all directories with the sync of any file, so the sync of a directory
# before its manifest can be left out here; the replay of cut logs misses it.
NOT_HERE = "no sync of the directory before the manifest"
TEETH: dict[str, Prepare] = {
    "no sync at all": no_sync(""),
    **{s.name: s.remove for s in SABOTAGES if s.name.startswith("no sync") and s.name != NOT_HERE},
}


class PowerCut(NamedTuple):
    """A cut of the run; the number draws when."""

    mode: str
    writing: str
    number: int

    def __str__(self) -> str:
        return f"{self.mode} {self.writing} {self.number}"


def _as_it_is(_: Interposer) -> None:
    """Takes nothing out."""


class PowerCuts:
    """Cuts runs, each in a child of this process, which must never start a thread.

    Args:
        directory: for journals and the file that the disk is in.
        seed: of the moments.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._seed = seed
        self._interposer = Interposer()
        torch.set_num_threads(1)
        warm_up()
        self._num_lines, self._seconds = self._measure()

    def _measure(self) -> tuple[int, float]:
        """How many lines the journal of a run has, and how long it takes."""
        with self._place() as name, LoopDisk(Path(name), JOURNAL_MODES[0]) as disk:
            started = time.monotonic()
            action = partial(self._train, disk.path, Path(name), DIRECT, _as_it_is)
            ended = forks.call(action, Path(name) / "out", _TIMEOUT_SECONDS)
            lines = read_lines(Path(name))
            if lines[-1:] != ["done"]:
                raise AssertionError(f"the run fails without any cut: {ended.error}")
            return len(lines), time.monotonic() - started

    def _place(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(dir=self._directory)

    def try_cut(self, cut: PowerCut, prepare: Prepare = _as_it_is) -> tuple[list[str], int]:
        """What is wrong after it, and how many lines the journal has.

        Args:
            prepare: called in the child before the run: takes something out of the code.
        """
        chance = random.Random(f"{self._seed} {cut}")
        # A line, so that a busy machine does not move all cuts to the beginning; then any moment.
        line = chance.randrange(self._num_lines)
        pause = chance.uniform(0, 3 * self._seconds / self._num_lines)
        grace = chance.choice((0, 0.01, 0.1))  # in which it may promise what it cannot keep
        with self._place() as name:
            place = Path(name)
            with LoopDisk(place, cut.mode) as disk:
                train = partial(self._train, disk.path, place, cut.writing, prepare)
                self._run_until(line, pause, grace, train, disk, place)
                disk.start_again()
                shutil.copytree(disk.path, place / "after")
            shutil.rmtree(place / "after" / "lost+found", ignore_errors=True)
            lines = read_lines(place)
            check = partial(check_stores, place / "after", lines, States(place))
            ended = forks.call(check, place / "check", _TIMEOUT_SECONDS)
            return ([ended.error] if ended.error else ended.result), len(lines)

    def _run_until(
        self,
        line: int,
        pause: float,
        grace: float,
        train: Callable[[], None],
        disk: LoopDisk,
        place: Path,
    ) -> None:
        """Start a run, stop the disk behind a line of its journal, kill the run."""
        pid = forks.start(train, place / "out")
        try:
            deadline = time.monotonic() + _TIMEOUT_SECONDS
            while len(read_lines(place)) <= line and time.monotonic() < deadline:
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    break  # nothing is left to be cut
                time.sleep(0.0005)
            time.sleep(pause)
            disk.stop()
            time.sleep(grace)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _train(self, root: Path, journal: Path, writing: str, prepare: Prepare) -> None:
        # The library's default cannot be told from outside of the scenario.
        scenario.staging = replace(scenario.staging, direct_io=writing == DIRECT)
        if writing == DIRECT:  # its arrays are so small that they would be written together
            segment_capture.BLOCK_BYTES = ALIGNMENT
        self._interposer.watch(root)
        prepare(self._interposer)
        run(Watcher(root, Journal(journal), lambda: "to come"))


def cuts(count: int) -> Iterator[PowerCut]:
    """So many in each journal mode and each way of writing."""
    for number in range(count):
        for mode in JOURNAL_MODES:
            for writing in (DIRECT, BUFFERED):
                yield PowerCut(mode, writing, number)


def teeth(place: Path, count: int, seed: int, names: Sequence[str]) -> int:
    """How many missing syncs were missed."""
    missed = 0
    side = PowerCuts(place, seed)
    for name in names:
        drawn = random.Random(seed).sample(list(cuts(count)), count)
        told = [side.try_cut(cut, TEETH[name])[0] for cut in drawn]
        found = sum(map(bool, told))
        first = next((each[0] for each in told if each), "")
        print(f"{name}: found in {found} of {count} cuts   {first[:150]}", flush=True)
        missed += found == 0
    return missed


def main() -> int:
    """0 if nothing was found wrong, or nothing could be tried; else 1."""
    parser = parser_of(__doc__)
    parser.add_argument("--cuts", type=int, default=50, help="of each mode and way of writing")
    parser.add_argument("--teeth", type=int, help="leave syncs out, so many cuts of each")
    parser.add_argument("--missing", choices=TEETH, help="of the syncs, only this one")
    parser.add_argument("--replay", nargs=3, metavar=("MODE", "WRITING", "NUMBER"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=fast_directory(), prefix="cpr-cuts-") as directory:
        place = Path(directory)
        try:
            enter_own_mounts()
            probe(place)
        except NoDiskError as error:
            print(f"SKIPPED, no power was cut: {error}")
            return 0
        if options.teeth:
            names = [options.missing] if options.missing else list(TEETH)
            return int(teeth(place, options.teeth, options.seed, names) > 0)
        tries = list(cuts(options.cuts))
        if options.replay:
            mode, writing, number = options.replay
            tries = [PowerCut(mode, writing, int(number))]
        campaign = Campaign("power_cut_test", options, lambda name: name.rpartition(" ")[0])
        side = PowerCuts(place, options.seed)

        def told_of(cut: PowerCut) -> tuple[str, dict[str, Any]]:
            found, num_lines = side.try_cut(cut)
            return str(cut), {"lines": num_lines, "found": found}

        return campaign.run(map(told_of, campaign.left(tries)))


if __name__ == "__main__":
    sys.exit(main())
