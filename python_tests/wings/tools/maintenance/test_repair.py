"""A damaged store is made sound again: the newest state that is provable, nothing invented."""

import importlib
import random
import shutil

import pytest

import cpr_ext
from cpr_ext.wings.tools.maintenance import repair, verify
from python_tests.faults.damage_scene import SMALLEST, Scene, Tally
from python_tests.faults.mixtures import Run
from python_tests.faults.repairing import Flips, check_repair, flipped
from python_tests.helpers import flip

# ``cpr_ext.wings.tools.maintenance.repair`` is the function.
repair_module = importlib.import_module("cpr_ext.wings.tools.maintenance.repair")
NUM_FLIPS = 60
SEED = 20261122


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    return Scene(tmp_path_factory.mktemp("scene"))


def test_a_flipped_byte_anywhere_is_repaired_to_the_newest_provable_state(scene, tmp_path):
    draw, tally = random.Random(SEED), Tally()
    names = sorted(scene.files)
    for number in range(NUM_FLIPS):
        name = names[number % len(names)]
        position = draw.randrange(len(scene.files[name]))
        check_repair(scene, tmp_path / "store", flipped(scene, name, position), tally)
    assert tally.faults == []
    assert tally.detected > NUM_FLIPS / 2


def test_a_missing_file_or_an_older_manifest_is_repaired_from_the_segments(scene, tmp_path):
    tally = Tally()
    for name in sorted(scene.files.keys() - {"MANIFEST.prev", "LOCK"}):
        check_repair(scene, tmp_path / "store", {name: None}, tally)
    for version in scene.versions[:-1]:  # an older manifest put back
        check_repair(scene, tmp_path / "store", {"MANIFEST.json": version}, tally)
    assert tally.faults == []


def test_a_snapshot_of_another_history_is_not_put_with_the_newest(tmp_path):
    """Its files could not be removed when training went back, and its number is a lower one."""
    store, kept = tmp_path / "store", tmp_path / "kept"
    run = Run.at(store, store=cpr_ext.StoreOptions(None, cpr_ext.Retention(1)))
    run.checkpointer.recover()
    for _ in range(3):
        run.train()
        run.save("base" if run.checkpointer.step_count == 1 else "partial")
    shutil.copytree(store / "segments", kept)
    run.release()
    run = Run.at(store, store=cpr_ext.StoreOptions(None, cpr_ext.Retention(1)))
    run.checkpointer.recover()
    run.train()
    run.save("base")
    run.release()
    for path in kept.iterdir():  # of the time before the base
        if not (store / "segments" / path.name).exists():
            shutil.copy(path, store / "segments")
    for name in ("MANIFEST.json", "MANIFEST.prev"):
        (store / name).unlink()
    report = repair(store, apply=True)
    assert (report.is_applied, report.step) == (True, 4)
    assert verify(store).is_sound
    again = Run.at(store)
    assert again.checkpointer.recover(on_damage="raise").step == 4
    assert again.wrong_rows(4) == 0
    again.release()


def test_what_is_replaced_or_dropped_is_kept(scene, tmp_path):
    store = scene.copy(tmp_path / "store")
    segment = [s for s in scene.segments if s.kind == "partial"][-1]
    damaged = flipped(scene, segment.name, segment.pieces[-1].begin)
    (store / segment.name).write_bytes(damaged[segment.name])
    report = repair(store, apply=True)
    assert report.is_applied
    assert report.older
    kept = {path.name: path.read_bytes() for path in (tmp_path / "store/repaired-1").rglob("*.*")}
    assert kept[segment.name.split("/")[1]] == damaged[segment.name]
    assert not (store / segment.name).exists()


def test_where_no_snapshot_is_whole_nothing_changes_and_the_way_is_named(scene, tmp_path):
    store = scene.copy(tmp_path / "store")
    flip(store / "segments/00000001-base.safetensors", 100)
    report = repair(store, apply=True)
    assert not report.is_applied
    assert not report.is_repairable
    assert 'recover(on_damage="fall_back")' in report.lost[0]
    for name in ("MANIFEST.json", "MANIFEST.prev"):
        (store / name).write_bytes(b"{}")
    for path in (store / "segments").glob("*-dense.safetensors"):
        path.write_bytes(b"")
    report = repair(store, apply=True)
    assert report.lost == [
        "no manifest and no dense part is sound, so nothing shows what the store held. Put the "
        "store back from a copy"
    ]


@pytest.fixture(scope="module")
def smallest(tmp_path_factory):
    return Scene(tmp_path_factory.mktemp("smallest"), shape=SMALLEST)


def test_a_repair_that_believes_rows_is_found(smallest, tmp_path, monkeypatch):
    flips, tally = Flips(smallest, tmp_path / "store"), Tally()
    monkeypatch.setattr(repair_module, "check_segment", lambda *_, **__: None)
    rows = next(s for s in smallest.segments if s.kind == "partial").pieces[1]
    flips.repair("segments/00000002-partial.safetensors", rows.begin, tally)
    assert len(tally.faults) == 1


def test_a_repair_that_goes_wrong_behind_equal_ones_is_found(smallest, tmp_path, monkeypatch):
    flips, tally = Flips(smallest, tmp_path / "store"), Tally()
    name = "MANIFEST.json"
    for position in (5, 6):
        flips.repair(name, position, tally)
    assert tally.faults == []

    def forget(work):
        apply(work)
        (work._store / name).write_bytes(b"")

    apply = repair_module._Repair.apply
    monkeypatch.setattr(repair_module._Repair, "apply", forget)
    flips.repair(name, 7, tally)
    assert len(tally.faults) == 1
