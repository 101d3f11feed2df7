"""Flip every byte of every file of a small store, one at a time."""

from __future__ import annotations

import logging
from pathlib import Path

from cpr_ext.errors import DamageError
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.recovery.restore import newest_undamaged
from cpr_ext.recovery.verify import refuse_damage
from cpr_ext.storage.file_names import PREVIOUS_FILE
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.wings.tools.maintenance import verify
from python_tests.faults.damage_scene import (
    SENTINEL,
    Cost,
    Scene,
    Tally,
    fault_of,
    fill,
    open_run,
    opened,
)
from python_tests.helpers import differences, flip


class Flipper:
    """Flips bytes under one live checkpointer, so that one flip takes a millisecond or two."""

    def __init__(self, scene: Scene, place: Path) -> None:
        self.scene = scene
        self.store = scene.copy(place)
        self.run = open_run(self.store, seed=9)
        self.run.checkpointer.recover()
        self._costs: dict[tuple, Cost] = {}
        with opened(scene.copy(place.with_name(place.name + "-whole"))) as whole:
            whole.checkpointer.recover()
            self.whole = whole.state()

    def close(self) -> None:
        self.run.checkpointer._release()

    def flip(self, name: str, position: int, tally: Tally) -> None:
        """Flip one bit, look, flip it back."""
        path = self.store / name
        flip(path, position, position % 8)
        try:
            fault = self._fault(name, path, position)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        finally:
            flip(path, position, position % 8)
        tally.note(f"{name}[{position}]", fault, harmless=path.name == "LOCK")

    def _fault(self, name: str, path: Path, position: int) -> str | None:
        if path.name == "LOCK":
            return self._lock_fault()
        if path.name.endswith("-dense.safetensors"):
            return self._dense_fault(path)
        if path.suffix == ".safetensors":
            return self._rows_fault(name, path, position)
        if path.name == PREVIOUS_FILE:  # read by repair and verify alone
            found = [damage.path for damage in verify(self.store).damaged]
            return None if found == [str(path)] else f"verify found {found}"
        return self._json_fault(path)

    def _rows_fault(self, name: str, path: Path, position: int) -> str | None:
        checkpointer = self.run.checkpointer
        fill(self.run)
        try:
            checkpointer.recover(shards=[0, 1], on_damage="raise")
            return "on_damage='raise' did not raise"
        except DamageError as error:
            if str(path) not in str(error):
                return f"not named: {error}"
        for table in checkpointer.tables:
            if any(not bool((array == SENTINEL).all()) for array in table.arrays().values()):
                return "on_damage='raise' changed rows"
        hit = self.scene.hit_by_flip(name, position)
        key = (name, *hit[name])
        if key not in self._costs:
            self._costs[key] = self.scene.cost([0, 1], hit)
        report = checkpointer.recover(shards=[0, 1])
        return fault_of(self.run, report, self._costs[key], [0, 1], self.store)

    def _dense_fault(self, path: Path) -> str | None:
        store = self.run.store
        try:
            refuse_damage(store.view())
            return "it was not found"
        except DamageError as error:
            if str(path) not in str(error):
                return f"not named: {error}"
        found, _ = newest_undamaged(store.view(), store.manifest.dense, RecoveryReport())
        good = [r for r in store.manifest.dense if store.path_of(r) != path]
        return None if found == good[-1] else f"it fell back to {found}"

    def _json_fault(self, path: Path) -> str | None:
        try:
            StoreReader(self.store)
        except DamageError as error:
            return None if str(path) in str(error) else f"not named: {error}"
        return "it was believed"

    def _lock_fault(self) -> str | None:
        report = self.run.checkpointer.recover()
        if report.damaged_segments or report.older_rows:
            return "it is no damage"
        found = differences(self.run.state(), self.whole)
        return f"the state differs: {found[:3]}" if found else None


def flip_every_byte(scene: Scene, place: Path, part: int, parts: int, every: int) -> dict:
    """Tallies by file of the bytes that fall to this part."""
    logging.disable(logging.WARNING)
    flipper = Flipper(scene, place)
    tallies = {}
    number = 0
    for name, data in scene.files.items():
        tallies[name] = Tally()
        for position in range(0, len(data), every):
            if number % parts == part:
                flipper.flip(name, position, tallies[name])
            number += 1
    flipper.close()
    return tallies
