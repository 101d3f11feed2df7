"""Files of a small store cut, deleted, swapped and replaced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cpr_ext.errors import DamageError, StoreError
from cpr_ext.storage.file_names import MANIFEST_FILE, PREVIOUS_FILE
from cpr_ext.storage.manifest import SegmentRecord
from python_tests.faults.damage_scene import (
    USUAL,
    Scene,
    Tally,
    fault_of,
    fill,
    opened,
)
from python_tests.helpers import Trained, differences


@dataclass(frozen=True)
class Case:
    """Files with other bytes, or without any (None)."""

    what: str
    changed: dict[str, bytes | None]


def cases(scene: Scene, sibling: Scene) -> Iterator[Case]:
    """Every kind of damage to whole files; recovery reads neither LOCK nor the manifest before."""
    unread = ("LOCK", PREVIOUS_FILE)
    names = [name for name in scene.files if not name.endswith(unread)]
    pieces = {segment.name: segment.pieces for segment in scene.segments}
    for name in names:
        data = scene.files[name]
        yield Case(f"delete {name}", {name: None})
        marks = {0, 1, 7, 8, 9, 4095, 4096, 4097, len(data) // 2, len(data) - 4096, len(data) - 1}
        marks |= {at for p in pieces.get(name, ()) for at in (p.begin, p.begin + 1, p.end - 1)}
        if name.endswith(".json"):
            marks |= set(range(0, len(data), 61))
        for size in sorted(mark for mark in marks if 0 <= mark < len(data)):
            yield Case(f"cut {name} to {size}", {name: data[:size]})
        for more in (b"\0", b"\n", bytes(4096)):
            yield Case(f"{len(more)} bytes after {name}", {name: data + more})
        yield Case(f"{name} all zero", {name: bytes(len(data))})
        if (other := sibling.files.get(name)) not in (None, data):
            yield Case(f"{name} of another run", {name: other})
        for number, version in enumerate(scene.versions[:-1] if name == MANIFEST_FILE else ()):
            yield Case(f"{name} as of commit {number + 1}", {name: version})
    for at, one in enumerate(names):
        for other in names[at + 1 :]:
            swapped = {one: scene.files[other], other: scene.files[one]}
            yield Case(f"swap {one} and {other}", swapped)


def check_case(scene: Scene, case: Case, place: Path, tally: Tally) -> None:
    """Try both ways to recover."""
    try:
        for mode in ("raise", "fall_back"):
            store = scene.copy(place)
            for name, data in case.changed.items():
                (store / name).unlink() if data is None else (store / name).write_bytes(data)
            fault = _case_fault(scene, case, store, mode)
            if fault is not None:
                break
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    tally.note(case.what, fault)


def _case_fault(scene: Scene, case: Case, store: Path, mode: str) -> str | None:
    paths = [str(store / name) for name in case.changed]
    try:
        with opened(store) as run:
            if MANIFEST_FILE in case.changed:
                return _other_manifest_fault(scene, run, mode)
            before = run.state()
            fill(run)
            try:
                report = run.checkpointer.recover(on_damage=mode)
            except DamageError as error:
                fill(run, 0.0)
                named = any(path in str(error) for path in paths)
                if not named:
                    return f"not named: {error}"
                if mode == "fall_back" and _good_dense(scene, case):
                    return f"it did not fall back: {error}"
                del before["model"], before["optimizers"]
                now = run.state()
                return None if not differences({k: now[k] for k in before}, before) else "changed"
            if mode == "raise":
                return "on_damage='raise' did not raise"
            record = _good_dense(scene, case)[-1]
            if report.step != record.last_step:
                return f"step {report.step}, not {record.last_step}"
            shards = list(range(USUAL.num_shards))
            cost = scene.cost(shards, scene.hit_by(case.changed), record.snapshot)
            return fault_of(run, report, cost, shards, store)
    except StoreError as error:
        # Refused when it was opened: nothing was changed, whatever the mode.
        named = any(path in str(error) for path in paths)
        return None if named else f"not named: {error}"


def _other_manifest_fault(scene: Scene, run: Trained, mode: str) -> str | None:
    """A sound manifest of another store, or of before: files that it names are gone or others.

    The full-recovery point was there before, so there is that to fall back to.
    """
    if run.store.is_empty:
        return "an empty manifest was believed"
    try:
        report = run.checkpointer.recover(on_damage=mode)
    except DamageError:
        return None
    fell_back = mode == "fall_back" and report.damaged_segments and report.step == 1
    is_exact = fell_back and not differences(run.rows(), scene.first_state)
    return None if is_exact else "segments that it does not name were taken"


def _good_dense(scene: Scene, case: Case) -> list[SegmentRecord]:
    return [r for r in scene.dense if f"segments/{r.file}" not in case.changed]
