"""A repair that is cut off at any of its commits is finished by the next one."""

import shutil

import pytest

from cpr_ext.errors import StorageError
from cpr_ext.storage.manifest import read_manifest
from cpr_ext.wings.tools.maintenance import repair, verify
from python_tests.faults.history_model import cut_off
from python_tests.faults.mixtures import Run
from python_tests.helpers import flip

_COMMITS = [(at, is_after) for at in range(2) for is_after in (False, True)]


def _without_a_manifest(store):
    (store / "MANIFEST.json").unlink()


def _with_a_damaged_segment(store):
    damaged = max((store / "segments").glob("*-partial.safetensors"))
    flip(damaged, damaged.stat().st_size - 100)


@pytest.mark.parametrize(
    "hurt", [_without_a_manifest, _with_a_damaged_segment], ids=["lost", "damaged"]
)
@pytest.mark.parametrize(("at", "is_after"), _COMMITS)
def test_a_repair_that_was_cut_off_is_finished(tmp_path, hurt, at, is_after):
    store, whole = tmp_path / "store", tmp_path / "whole"
    run = Run.at(store)
    run.checkpointer.recover()
    for kind in ("base", "partial", "partial"):
        run.train()
        run.save(kind)
    run.release()
    hurt(store)
    shutil.copytree(store, whole)
    assert repair(whole, apply=True).is_applied
    with pytest.raises(StorageError), cut_off(at, is_after=is_after):
        repair(store, apply=True)
    is_finished = verify(store).is_sound
    report = repair(store, apply=True)
    assert report.is_applied != is_finished
    assert verify(store).is_sound
    again = Run.at(store)
    step = again.checkpointer.recover().step
    assert (step, again.wrong_rows(step)) == (3 if hurt is _without_a_manifest else 2, 0)
    again.release()
    held, expected = (read_manifest(each) for each in (store, whole))
    assert [r.file for r in held.records()] == [r.file for r in expected.records()]
