"""A repair that is cut off at any of its commits is finished by the next one."""

import shutil

import pytest

from cpr_ext.errors import StorageError
from cpr_ext.storage.manifest import Manifest
from cpr_ext.tools.maintenance import repair, verify
from python_tests.faults.history_model import cut_off
from python_tests.faults.mixtures import DIRECTORIES, Run
from python_tests.helpers import flip

_COMMITS = [(at, is_after) for at in range(3) for is_after in (False, True)]


def _train(directory, kinds):
    run = Run.at(directory)
    run.checkpointer.recover()
    for kind in kinds:
        run.train()
        run.save(kind)
    run.release()


def _with_the_dense_part_of_another_store(folder):
    _train(folder / "store", ["base", "partial", "partial"])
    _train(folder / "other", ["base"])
    shutil.rmtree(folder / "store" / DIRECTORIES[0])
    shutil.copytree(folder / "other" / DIRECTORIES[0], folder / "store" / DIRECTORIES[0])


def _with_a_damaged_base(folder):
    _train(folder / "store", ["base", "partial", "base", "partial"])
    for name in DIRECTORIES[1:]:
        damaged = max((folder / "store" / name).glob("*-base.safetensors"))
        flip(damaged, damaged.stat().st_size - 100)


def _rows(directory):
    run = Run.at(directory)
    try:
        report = run.checkpointer.recover()
        return report.step, report.rows_stale, run.model.weight.detach().clone()
    finally:
        run.release()


@pytest.mark.parametrize(
    "hurt", [_with_the_dense_part_of_another_store, _with_a_damaged_base], ids=["mixed", "damaged"]
)
@pytest.mark.parametrize(("at", "is_after"), _COMMITS)
def test_a_repair_that_was_cut_off_is_finished(tmp_path, hurt, at, is_after):
    hurt(tmp_path)
    store, whole = tmp_path / "store", tmp_path / "whole"
    shutil.copytree(store, whole)
    assert repair(whole, apply=True).is_applied
    with pytest.raises(StorageError), cut_off(at, is_after=is_after):
        repair(store, apply=True)
    is_finished = verify(store).is_sound
    report = repair(store, apply=True)
    assert report.is_applied != is_finished
    assert report.is_sound == is_finished
    assert verify(store).is_sound
    step, rows_stale, rows = _rows(store)
    expected_step, expected_stale, expected_rows = _rows(whole)
    assert step == expected_step
    assert rows.equal(expected_rows)
    assert rows_stale is None or (expected_stale is not None and rows_stale >= expected_stale)
    for name in DIRECTORIES:
        held = [record.file for record in Manifest(store / name).segments]
        assert held == [record.file for record in Manifest(whole / name).segments]
