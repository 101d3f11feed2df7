"""Every byte of a small store flipped, then ``cpr repair``: the newest whole snapshot is there.

python -m python_tests.faults.repairing                    part of make damage-test
python -m python_tests.faults.repairing --usual --every 20  of a store with more files
python -m python_tests.faults.repairing --resume build/repairs --seconds 150   until it is 0

Every byte is repaired. What a repair has made is verified, recovered and compared with the
reference unless the same store, byte for byte, came out of the same kind of damage before.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import tempfile
from collections.abc import Hashable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cpr_ext.errors import DamageError
from cpr_ext.storage.file_names import LOCK_FILE
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.wings.tools.maintenance import RepairReport, repair, verify
from python_tests.faults.campaign import Campaign, parser_of
from python_tests.faults.damage_scene import (
    SMALLEST,
    USUAL,
    Scene,
    Tally,
    fault_of,
    fill,
    opened,
)
from python_tests.faults.harness import fast_directory
from python_tests.faults.power_cut import fingerprint


def check_repair(scene: Scene, store: Path, changed: dict[str, bytes | None], tally: Tally) -> None:
    """Damage a copy of the store, repair it, and compare what it then holds with the reference."""
    what = ", ".join(changed)
    try:
        fault = _fault(scene, scene.copy(store), changed)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    harmless = all(name.endswith(LOCK_FILE) for name in changed)
    tally.note(what, fault, harmless=harmless)


def _fault(scene: Scene, store: Path, changed: dict[str, bytes | None]) -> str | None:
    for name, data in changed.items():
        (store / name).unlink() if data is None else (store / name).write_bytes(data)
    hit = scene.hit_by(changed)
    points = _sound_points(scene, changed, hit)
    before = _contents(store)
    dry = repair(store)
    if _contents(store) != before:
        return "a dry run changed something"
    if dry.lost or not points:
        return _lost_fault(scene, store, dry, points, before)
    report = repair(store, apply=True)
    if report.is_sound != all(name.endswith(LOCK_FILE) for name in changed):
        return f"damaged: {report.damaged}"
    if (report.damaged, report.actions) != (dry.damaged, dry.actions):
        return f"the dry run said {dry}"
    if not (checked := verify(store)).is_sound:
        return f"verify: {checked.damaged}"
    if not (again := repair(store)).is_sound:
        return f"repaired, and yet {again.damaged}"
    if bool(report.older) != (len(points) < len(scene.dense)):
        return f"older: {report.older}"
    return _state_fault(scene, store, points[-1])


def _sound_points(scene: Scene, changed: dict, hit: dict) -> list[SegmentRecord]:
    """The snapshots of which every file is as it was."""
    damaged = [s.snapshot for s in scene.segments if hit.get(s.name)]
    return [
        point
        for point in scene.dense
        if f"segments/{point.file}" not in changed
        and not any(snapshot <= point.snapshot for snapshot in damaged)
    ]


def _state_fault(scene: Scene, store: Path, point: SegmentRecord) -> str | None:
    shards = list(range(scene.shape.num_shards))
    cost = scene.cost(shards, {}, point.snapshot)
    with opened(store, shape=scene.shape) as run:
        fill(run)
        report = run.checkpointer.recover(on_damage="raise")
        if report.step != point.last_step:
            return f"step {report.step}, not {point.last_step}"
        return fault_of(run, report, cost, shards, store, scene.shape)


def _lost_fault(
    scene: Scene, store: Path, dry: RepairReport, points: list, before: dict[str, bytes]
) -> str | None:
    if not dry.lost:
        return f"no snapshot is whole, and it says {dry}"
    if points:
        return f"{points[-1]} is whole, and it says {dry.lost}"
    report = repair(store, apply=True)
    if report.is_applied or _contents(store) != before:
        return "it changed what it cannot repair"
    try:
        with opened(store, shape=scene.shape) as run:
            run.checkpointer.recover()  # takes what is sound
    except DamageError as error:
        return f"recovery does not fall back: {error}"
    return None


def _contents(store: Path) -> dict[str, bytes]:
    files = (p for p in sorted(store.rglob("*")) if p.is_file() and p.name != LOCK_FILE)
    return {str(path.relative_to(store)): path.read_bytes() for path in files}


def flipped(scene: Scene, name: str, position: int) -> dict[str, bytes | None]:
    """A file of the store with one bit flipped."""
    data = bytearray(scene.files[name])
    data[position] ^= 1 << position % 8
    return {name: bytes(data)}


class Flips:
    """Repairs one flipped byte after the other.

    Attributes:
        num_compared: of how many all was looked at.
    """

    def __init__(self, scene: Scene, place: Path) -> None:
        self.num_compared = 0
        self._scene = scene
        self._place = place
        self._right: set[Hashable] = set()  # what was compared and found right

    def repair(self, name: str, position: int, tally: Tally) -> None:
        """Flip a bit of this byte, and repair."""
        changed = flipped(self._scene, name, position)
        try:
            made = self._made_of(name, changed)
        except Exception as error:
            tally.note(f"{name}[{position}]", f"{type(error).__name__}: {error}")
            return
        if made is not None and made in self._right:
            tally.note(f"{name}[{position}]", None)
            return
        self.num_compared += 1
        num_faults = len(tally.faults)
        check_repair(self._scene, self._place, changed, tally)
        if made is not None and len(tally.faults) == num_faults:
            self._right.add(made)

    def _made_of(self, name: str, changed: dict[str, bytes | None]) -> Hashable | None:
        """All that tells this repair from others; None if it must be compared in any case."""
        store = self._scene.copy(self._place)
        data = changed[name]
        assert data is not None
        (store / name).write_bytes(data)
        report = repair(store, apply=True)
        if not report.is_applied:
            return None
        backup = Path(report.backup)
        kept = (backup / Path(name).name).read_bytes()
        assert kept == data, f"{name} is not kept as it was in {backup}"
        left = {
            path: _without_commits(content) if path.startswith("MANIFEST") else content
            for path, content in _contents(store).items()
            if not path.startswith(backup.name)
        }
        told = (report.step, *report.actions, None, *report.older)
        return name, told, repr(self._scene.hit_by(changed)), fingerprint(left)


def _without_commits(manifest: bytes) -> bytes:
    """A manifest without its commit, which has a random number in it."""
    content = json.loads(manifest)["content"]
    return json.dumps(content | {"commit_id": None}).encode()


class Piece(NamedTuple):
    """Some bytes of a file of the store, so many apart."""

    name: str
    begin: int
    end: int
    every: int

    def __str__(self) -> str:
        return f"{self.name}:{self.begin}"


def pieces(scene: Scene, every: int) -> Iterator[Piece]:
    """All bytes of the store."""
    step = every * 1024
    for name, data in scene.files.items():
        for begin in range(0, len(data), step):
            yield Piece(name, begin, min(begin + step, len(data)), every)


_flips: Flips  # of this process


def _begin(place: Path, is_usual: bool) -> Scene:
    global _flips
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    here = Path(tempfile.mkdtemp(dir=place))
    scene = Scene(here / "scene", shape=USUAL if is_usual else SMALLEST)
    _flips = Flips(scene, here / "copy")
    return scene


def _repair_piece(piece: Piece) -> tuple[str, dict[str, Any]]:
    tally, compared = Tally(), _flips.num_compared
    for position in range(piece.begin, piece.end, piece.every):
        _flips.repair(piece.name, position, tally)
    told = {"bytes": tally.tried, "compared": _flips.num_compared - compared}
    return str(piece), {**told, "in LOCK": tally.harmless, "found": tally.faults}


def main() -> int:
    """Print the counts; 1 if a repair did not do what it must."""
    parser = parser_of(__doc__)
    parser.add_argument("--usual", action="store_true", help="the store of the other damages")
    parser.add_argument("--every", type=int, default=1, help="flip each N-th byte only")
    options = parser.parse_args()
    campaign = Campaign("repairing", options, lambda name: name.partition(":")[0])
    with tempfile.TemporaryDirectory(dir=fast_directory(), prefix="cpr-repairs-") as directory:
        beginning = (Path(directory), options.usual)
        left = campaign.left(pieces(_begin(*beginning), options.every))
        with multiprocessing.get_context("spawn").Pool(options.jobs, _begin, beginning) as pool:
            rounds = iter(lambda: list(islice(left, 8 * options.jobs)), [])
            return campaign.run(
                done for some in rounds for done in pool.imap_unordered(_repair_piece, some)
            )


if __name__ == "__main__":
    sys.exit(main())
