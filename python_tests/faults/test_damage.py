"""A sample of ``make damage-test``, and that it would tell."""

import random

import pytest
import torch

from cpr_ext.errors import DamageError
from cpr_ext.recovery import restore, sources
from python_tests.faults.damage_cases import Case, cases, check_case
from python_tests.faults.damage_flips import Flipper
from python_tests.faults.damage_scene import HEADER, Scene, Tally, fill, opened
from python_tests.helpers import assert_same, flip

NUM_FLIPS = 250
NUM_CASES = 50
SEED = 20260801


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    return Scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def sibling(tmp_path_factory):
    return Scene(tmp_path_factory.mktemp("sibling"), seed=1)


def test_a_flipped_byte_is_found_and_costs_what_is_reported(scene, tmp_path):
    draw, tally = random.Random(SEED), Tally()
    flipper = Flipper(scene, tmp_path / "store")
    names = sorted(scene.files)
    for number in range(NUM_FLIPS):
        name = names[number % len(names)]
        flipper.flip(name, draw.randrange(len(scene.files[name])), tally)
    flipper.close()
    assert tally.faults == []
    assert tally.detected + tally.harmless == NUM_FLIPS
    assert tally.harmless < NUM_FLIPS / 4  # LOCK only


def test_every_piece_of_every_segment_is_known_to_the_reference(scene):
    assert {s.kind for s in scene.segments} == {"base", "partial"}
    costs = [
        scene.cost([shard], {s.name: {HEADER} if p.chunk == HEADER else {n}})
        for shard in (0, 1)
        for s in scene.segments
        for n, p in enumerate(s.pieces)
    ]
    for what in ("older", "missing", "in_doubt"):
        assert any(getattr(cost, what) for cost in costs), f"no damage makes rows {what}"
    assert any(not (c.older or c.missing or c.in_doubt) for c in costs), "none is superseded"


def test_cut_deleted_swapped_and_replaced_files_are_found(scene, sibling, tmp_path):
    tally = Tally()
    everything = list(cases(scene, sibling))
    whole = [case for case in everything if case.what.startswith("delete")]
    for case in [*whole, *random.Random(SEED).sample(everything, NUM_CASES)]:
        check_case(scene, case, tmp_path / "store", tally)
    assert tally.faults == []


def test_damage_of_several_files_is_named_as_a_whole_before_anything_changes(scene, tmp_path):
    store = scene.copy(tmp_path / "store")
    hit = [scene.segments[0].name, scene.segments[-1].name, "segments/00000001-dense.safetensors"]
    for name in hit:
        flip(store / name, (store / name).stat().st_size - 1)
    with opened(store) as run:
        before = run.state()
        with pytest.raises(DamageError, match="nothing was changed") as error:
            run.checkpointer.recover(on_damage="raise")
        assert all(str(store / name) in str(error.value) for name in hit)
        assert_same(run.state(), before)
        with pytest.raises(DamageError) as error:
            run.checkpointer.recover(shards=[0], on_damage="raise")
        told = [name for name in hit if str(store / name) in str(error.value)]
        assert told == hit[:2], "only the files of rows are read"
        run.checkpointer.recover()
    with opened(store) as run:  # falling back left the files as they were
        with pytest.raises(DamageError):
            run.checkpointer.recover(on_damage="raise")


def test_another_store_is_checked_before_anything_changes_too(scene, tmp_path):
    store = scene.copy(tmp_path / "old")
    hit = scene.segments[1]
    at = hit.pieces[-1].begin
    flip(store / hit.name, at)
    with opened(tmp_path / "new") as run:
        before = run.state()
        with pytest.raises(DamageError, match=hit.name):
            run.checkpointer.recover(from_store=store, on_damage="raise")
        assert_same(run.state(), before)
        report = run.checkpointer.recover(from_store=store)
        cost = scene.cost([0, 1], scene.hit_by_flip(hit.name, at))
        told = (report.rows_missing, report.rows_possibly_stale)
        assert told == (sum(map(len, cost.missing.values())), cost.in_doubt)
        assert set(report.older_rows) == set(cost.older)


def test_a_row_that_was_looked_up_and_is_older_counts_once(scene, tmp_path):
    store = scene.copy(tmp_path / "store")
    with opened(store) as run:
        run.checkpointer.recover()
        newest = scene.segments[-1]
        weights = next(p for p in newest.pieces if p.chunk >= 0 and not p.is_row_ids)
        flip(store / newest.name, weights.begin)
        cost = scene.cost([0], scene.hit_by_flip(newest.name, weights.begin))
        ((table, older),) = cost.older.items()
        row = next(iter(older))
        other = next(r for r in range(2) if r not in older)
        with run.checkpointer.writing_rows(table, torch.tensor([row, other])):
            fill(run)
        report = run.checkpointer.recover(shards=[0])
        assert report.older_rows[table].row_ids.tolist() == sorted(older)
        assert report.rows_stale == len(older) + 1


@pytest.mark.parametrize("what", ["verify first", "account"])
def test_it_would_tell(scene, tmp_path, monkeypatch, what):
    if what == "verify first":
        monkeypatch.setattr(sources, "refuse_damage", lambda *arguments: None)
    else:
        monkeypatch.setattr(restore, "account", lambda shard, ranges, findings: None)
    flipper, tally = Flipper(scene, tmp_path / "store"), Tally()
    base = scene.segments[0].name
    flipper.flip(base, 10, tally)
    flipper.close()
    assert len(tally.faults) == 1
    changed = Case("a lost base", {base: None})
    check_case(scene, changed, tmp_path / "again", tally)
    assert len(tally.faults) == 2
