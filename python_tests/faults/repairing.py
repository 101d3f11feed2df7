"""Every byte of a small store flipped, then ``cpr repair``: the newest provable state is there.

python -m python_tests.faults.repairing             all of it, hours
python -m python_tests.faults.repairing --every 20  each 20th byte; part of make damage-test
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

from cpr_ext.errors import DamageError
from cpr_ext.file_names import LOCK_FILE
from cpr_ext.maintenance import repair, verify
from python_tests.faults.damage import (
    NUM_SHARDS,
    Cost,
    Scene,
    Tally,
    fault_of,
    fill,
    opened,
)


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
    dense = [r for r in scene.dense if f"dense/{r.file}" not in changed]
    cost = scene.cost(list(range(NUM_SHARDS)), hit, dense[-1].snapshot)
    before = _contents(store)
    dry = repair(store)
    if _contents(store) != before:
        return "a dry run changed something"
    if dry.lost or cost.missing:
        return _lost_fault(store, dry, cost, before)
    report = repair(store, apply=True)
    if report.is_sound != all(name.endswith(LOCK_FILE) for name in changed):
        return f"damaged: {report.damaged}"
    if (report.damaged, report.actions) != (dry.damaged, dry.actions):
        return f"the dry run said {dry}"
    if not (checked := verify(store)).is_sound:
        return f"verify: {checked.damaged}"
    if not (again := repair(store)).is_sound:
        return f"repaired, and yet {again.damaged}"
    if bool(report.older) != bool(hit or len(dense) < len(scene.dense)):
        return f"older: {report.older}"
    return _state_fault(scene, store, cost, dense[-1].last_step)


def _state_fault(scene: Scene, store: Path, cost: Cost, step: int) -> str | None:
    with opened(store) as run:
        fill(run)
        report = run.checkpointer.recover(on_damage="raise")
        if report.step != step:
            return f"step {report.step}, not {step}"
        plain = Cost(rows=cost.rows)
        return fault_of(run, report, plain, list(range(NUM_SHARDS)), store)


def _lost_fault(store: Path, dry, cost: Cost, before: dict[str, bytes]) -> str | None:
    if not dry.lost:
        return f"rows are lost, and it says {dry}"
    if not cost.missing:
        return f"nothing is lost, and it says {dry.lost}"
    report = repair(store, apply=True)
    if report.is_applied or _contents(store) != before:
        return "it changed what it cannot repair"
    try:
        with opened(store) as run:
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


def _part(arguments: tuple[int, int, int]) -> Tally:
    part, parts, every = arguments
    logging.disable(logging.WARNING)
    tally = Tally()
    with tempfile.TemporaryDirectory() as place:
        scene = Scene(Path(place) / "scene")
        numbers = [(n, p) for n, data in scene.files.items() for p in range(0, len(data), every)]
        for name, position in numbers[part::parts]:
            check_repair(scene, Path(place) / "copy", flipped(scene, name, position), tally)
    return tally


def main() -> int:
    """Print the counts; 1 if a repair did not do what it must."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="flip each N-th byte only")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        parts = pool.map(_part, [(n, options.jobs, options.every) for n in range(options.jobs)])
    total = Tally()
    for tally in parts:
        total.add(tally)
    for fault in total.faults[:20]:
        print("FAULT", fault)
    seconds = time.monotonic() - started
    print(f"{total.tried} bytes flipped, {len(total.faults)} repaired wrongly; {seconds:.0f} s")
    return 1 if total.faults else 0


if __name__ == "__main__":
    sys.exit(main())
