"""Recovery after the death of the process."""

import pytest
import torch

import cpr_ext
from cpr_ext.errors import SnapshotError, StorageError, UsageError
from cpr_ext.storage import store
from python_tests.helpers import Trained, assert_same, row_records
from python_tests.recovery.losses import OPTIONS


def test_lookups_of_a_step_that_training_goes_back_behind_make_no_row_dirty(tmp_path):
    run = Trained(tmp_path, **OPTIONS)
    run.train(1)
    run.checkpointer.record_lookups("tables.big", torch.tensor([7, 8]))
    run.checkpointer.recover()
    run.checkpointer._recorder.flush()
    assert run.checkpointer._trackers["tables.big"].num_dirty(0, 200) == 0
    run.checkpointer.close()


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_crash_at_the_commit_of_a_new_base_leaves_one_full_recovery_point_whole(
    tmp_path, monkeypatch, is_durable
):
    options = {**OPTIONS, "priority": cpr_ext.AllRows()}
    run = Trained(tmp_path, lookups=30, **options)
    run.train(1)
    run.checkpointer.wait()
    states = {1: run.state()}
    write = store.write_manifest

    def die(directory, manifest):
        if is_durable:
            write(directory, manifest)
        raise StorageError(5, "the process died here")

    monkeypatch.setattr(store, "write_manifest", die)
    run.train(1)
    states[2] = run.state()
    run.checkpointer.save("base")
    with pytest.raises(SnapshotError):
        run.checkpointer.wait()
    monkeypatch.undo()
    run.die()
    fresh = Trained(tmp_path, seed=4, **options)
    step = 2 if is_durable else 1
    assert fresh.checkpointer.recover(mode="full").step == step
    assert_same(fresh.state(), states[step])
    named = {path for _, path in row_records(fresh.store)}
    named |= {fresh.store.path_of(record) for record in fresh.store.manifest.dense}
    assert set(fresh.store.segments.iterdir()) == named
    fresh.checkpointer.close()


def test_step_refuses_to_train_over_snapshots_that_were_not_recovered(tmp_path):
    run = Trained(tmp_path, **OPTIONS)
    run.train(1)
    run.checkpointer.close()
    fresh = Trained(tmp_path, **OPTIONS)
    files = sorted(tmp_path.rglob("*.safetensors"))
    for call in (fresh.checkpointer.step, fresh.checkpointer.save):
        with pytest.raises(UsageError, match=r"snapshot of step 1; call recover\(\)"):
            call()
    assert sorted(tmp_path.rglob("*.safetensors")) == files
    fresh.checkpointer.recover()
    fresh.train(1)
    fresh.checkpointer.close()
