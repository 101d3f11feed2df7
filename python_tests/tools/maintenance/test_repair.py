"""A damaged store is made sound again: the newest state that is provable, nothing invented."""

import importlib
import json
import random

import pytest

import cpr_ext
from cpr_ext.cli.app import app
from cpr_ext.errors import CprError, DamageError, StoreError
from cpr_ext.storage.manifest import Manifest
from cpr_ext.tools.maintenance import repair, survey, verify
from python_tests.faults.damage_scene import SMALLEST, Scene, Tally, opened
from python_tests.faults.history_model import cut_off
from python_tests.faults.mixtures import Run
from python_tests.faults.repairing import Flips, check_repair, flipped
from python_tests.helpers import Trained, assert_same, flip

# ``cpr_ext.tools.maintenance.repair`` is the function.
repair_module = importlib.import_module("cpr_ext.tools.maintenance.repair")
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


def test_a_missing_file_is_repaired_like_a_damaged_one(scene, tmp_path):
    tally = Tally()
    for name in sorted(scene.files.keys() - {"STORE.copy.json"}):  # older stores have none
        check_repair(scene, tmp_path / "store", {name: None}, tally)
    assert tally.faults == []


def test_an_older_manifest_put_back_is_rebuilt_from_the_segments(scene, tmp_path):
    tally = Tally()
    older = {name: versions[-2] for name, versions in scene.versions.items() if "shard" in name}
    for name, data in older.items():
        check_repair(scene, tmp_path / "store", {name: data}, tally)
    assert tally.faults == []


@pytest.mark.parametrize("with_descent", [True, False])
def test_a_file_left_over_is_not_taken_for_one_of_a_lost_manifest(
    tmp_path, monkeypatch, with_descent
):
    """Its number lies between those of two that are: only their chains show that it is none."""
    store, left = tmp_path / "store", "00000004-partial.safetensors"
    run = Run.at(store)
    run.checkpointer.recover()
    for kind in ("base", "partial"):
        run.train()
        run.save(kind)
    run.train()
    run.train()
    with cut_off(0, is_after=False), pytest.raises(CprError):
        run.save("partial")
    run.release()
    monkeypatch.setattr(Manifest, "remove_unlisted", _leave)
    run = Run.at(store)
    run.checkpointer.recover()
    run.train()
    run.save("partial")
    run.release()
    assert (store / "shard-00000" / left).exists()
    (store / "shard-00000/MANIFEST.json").unlink()
    if not with_descent:
        monkeypatch.setattr(repair_module, "keep_descent", lambda *_: None)
    assert repair(store, apply=True).is_applied
    assert verify(store).is_sound
    run = Run.at(store)
    report = run.checkpointer.recover()
    assert (report.step, report.rows_stale) == (3, 0)
    assert (run.wrong_rows(3) == 0) == with_descent
    run.release()


def _leave(manifest):
    """Remove nothing, as where the operating system refuses: only numbers are not used again."""
    manifest.highest_left_over = 4


def test_all_manifests_and_the_identity_at_once_are_rebuilt(scene, tmp_path):
    tally = Tally()
    names = [name for name in scene.files if name.endswith("MANIFEST.json")]
    check_repair(scene, tmp_path / "store", dict.fromkeys([*names, "STORE.json"]), tally)
    assert tally.faults == []


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


def test_a_sound_store_is_left_alone(scene, tmp_path):
    store = scene.copy(tmp_path / "store")
    report = repair(store, apply=True)
    assert (report.is_sound, report.is_applied, report.step) == (True, False, 5)
    assert verify(store).left_overs == []
    assert not list(store.glob("repaired-*"))


@pytest.mark.parametrize("place", ["header", "rows"])
def test_a_damaged_base_is_made_of_newer_rows_where_they_are_all(tmp_path, place):
    store = tmp_path / "store"
    run = Trained(
        store,
        {"t": (6, 2)},
        optimizer="sgd",
        lookups=200,
        num_shards=1,
        consistency="step",
        schedule=cpr_ext.EverySteps(1000),
        priority=cpr_ext.AllRows(),
        retention=cpr_ext.Retention(3),
        rebase_after=None,
    )
    run.train(1)
    run.checkpointer.wait()
    for _ in range(2):
        run.train(1)
        run.checkpointer.save("partial")
        run.checkpointer.wait()
    expected = run.rows()
    run.die()
    base = store / "shard-00000/00000001-base.safetensors"
    flip(base, 100 if place == "header" else base.stat().st_size - 1)
    report = repair(store, apply=True)
    assert report.is_applied
    assert verify(store).is_sound
    # The first point is gone with the base; the others are not claimed to be complete.
    points = {r.last_step: r.is_complete for r in Manifest(store / "dense").segments}
    assert points == {2: False, 3: False}
    assert len([text for text in report.older if "recovery point" in text]) == 1 + 2
    assert [r.kind for r in Manifest(store / "shard-00000").segments] == ["base", "partial"]
    again = Trained(store, {"t": (6, 2)}, optimizer="sgd", seed=4, num_shards=1)
    assert again.checkpointer.recover(on_damage="raise").step == 3
    assert_same(again.rows(), expected)
    again.checkpointer._release()


def test_both_copies_of_the_identity_damaged_is_said(scene, tmp_path):
    store = scene.copy(tmp_path / "store")
    for name in ("STORE.json", "STORE.copy.json"):
        (store / name).write_bytes(b"{}")
    with pytest.raises(DamageError, match=r"STORE\.json"):
        repair(store, apply=True)


def test_a_store_in_training_is_not_repaired(scene, tmp_path):
    store = scene.copy(tmp_path / "store")
    with opened(store), pytest.raises(StoreError, match="being written by this same process"):
        repair(store, apply=True)


def test_the_command_is_dry_unless_told(scene, tmp_path, cli):
    store = scene.copy(tmp_path / "store")
    (store / "dense" / "MANIFEST.json").unlink()
    dry = cli.invoke(app, ["repair", str(store)])
    assert dry.exit_code == 1
    assert "can be repaired" in dry.output
    assert not (store / "dense" / "MANIFEST.json").exists()
    done = cli.invoke(app, ["repair", str(store), "--apply", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.output)["is_applied"]
    assert cli.invoke(app, ["repair", str(store)]).exit_code == 0


@pytest.fixture
def cli():
    from click.testing import CliRunner

    return CliRunner()


@pytest.fixture(scope="module")
def smallest(tmp_path_factory):
    return Scene(tmp_path_factory.mktemp("smallest"), shape=SMALLEST)


def test_the_smallest_store_has_every_kind_of_file(smallest):
    names = [name.rpartition("/")[2].lstrip("0123456789-") for name in smallest.files]
    kinds = {"base.safetensors", "partial.safetensors", "dense.safetensors", "LOCK"}
    assert set(names) == kinds | {"MANIFEST.json", "STORE.json", "STORE.copy.json"}
    assert len(smallest.dense) == 2


def test_flips_that_are_repaired_alike_are_compared_once(smallest, tmp_path):
    flips, tally = Flips(smallest, tmp_path / "store"), Tally()
    rows = next(s for s in smallest.segments if s.kind == "partial").pieces[1]
    name = "shard-00000/00000002-partial.safetensors"
    for position in range(rows.begin, rows.begin + 5):
        flips.repair(name, position, tally)
    assert (tally.tried, tally.faults, flips.num_compared) == (5, [], 1)


def test_a_repair_that_believes_rows_is_found(smallest, tmp_path, monkeypatch):
    flips, tally = Flips(smallest, tmp_path / "store"), Tally()
    monkeypatch.setattr(survey, "check_rows", lambda *_, **__: None)
    rows = next(s for s in smallest.segments if s.kind == "partial").pieces[1]
    flips.repair("shard-00000/00000002-partial.safetensors", rows.begin, tally)
    assert len(tally.faults) == 1


def test_a_repair_that_goes_wrong_behind_equal_ones_is_found(smallest, tmp_path, monkeypatch):
    flips, tally = Flips(smallest, tmp_path / "store"), Tally()
    name = "dense/MANIFEST.json"
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
