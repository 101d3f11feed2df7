"""Recovery after the death of the process."""

from contextlib import suppress

import pytest
import torch

import cpr_ext
from cpr_ext.errors import SnapshotError, UsageError
from cpr_ext.storage.manifest import Manifest
from python_tests.helpers import (
    Trained,
    assert_same,
    copy_state,
    differences,
    shard_records,
)
from python_tests.recovery.losses import NUM_SHARDS, OPTIONS


def test_a_restart_continues_from_the_newest_committed_snapshot(tmp_path):
    run = Trained(tmp_path, **OPTIONS)
    run.train(5)
    run.checkpointer.wait()
    newest = run.store.dense.segments[-1].last_step
    run.die()
    fresh = Trained(tmp_path, seed=9, **OPTIONS)
    report = fresh.checkpointer.recover()
    assert report.step == newest == 4
    assert fresh.checkpointer.step_count == 4
    fresh.train(3)
    fresh.checkpointer.close()
    last = Trained(tmp_path, seed=10, **OPTIONS)
    assert last.checkpointer.recover().step == 7
    last.checkpointer.close()


def test_lookups_of_a_step_that_training_goes_back_behind_make_no_row_dirty(tmp_path):
    run = Trained(tmp_path, **OPTIONS)
    run.train(1)
    run.checkpointer.record_lookups("tables.big", torch.tensor([7, 8]))
    run.checkpointer.recover()
    run.checkpointer._recorder.flush()
    assert run.checkpointer._trackers["tables.big"].num_dirty(0, 200) == 0
    run.checkpointer.close()


def test_extra_state_comes_back_as_it_was_at_the_snapshot(tmp_path):
    position = {"epoch": 0, "tensor": torch.arange(3), "names": ("a", None)}
    run = Trained(tmp_path, extra_state=lambda: dict(position), **OPTIONS)
    run.train(1)
    run.checkpointer.wait()
    position["epoch"] = 1
    run.die()
    fresh = Trained(tmp_path, **OPTIONS)
    extra = fresh.checkpointer.recover().extra_state
    assert_same(extra, {"epoch": 0, "tensor": torch.arange(3), "names": ("a", None)})
    fresh.checkpointer.close()


def test_an_empty_store_reports_step_zero_and_leaves_the_model_as_it_is(tmp_path):
    run = Trained(tmp_path, **OPTIONS)
    before = run.state()
    report = run.checkpointer.recover()
    assert (report.step, report.num_samples, report.rows_restored) == (0, 0, 0)
    assert report.extra_state is None
    assert_same(run.state(), before)
    run.checkpointer.close()


def test_segments_of_a_snapshot_that_never_committed_as_a_whole_are_rolled_back(
    tmp_path, monkeypatch
):
    options = {**OPTIONS, "priority": cpr_ext.AllRows()}
    run = Trained(tmp_path, lookups=30, **options)
    run.train(1)
    run.checkpointer.wait()
    at_one = run.state()
    commit = Manifest.commit

    def fail_for_dense(self, segments, seen=None):
        if self.directory.name == "dense":
            raise OSError("the process died here")
        commit(self, segments, seen)

    monkeypatch.setattr(Manifest, "commit", fail_for_dense)
    run.train(3)
    with pytest.raises(SnapshotError):
        run.checkpointer.wait()
    monkeypatch.undo()
    assert {record.snapshot for _, record, _ in shard_records(run.store)} == {1, 2}
    run.die()
    fresh = Trained(tmp_path, seed=4, **options)
    assert fresh.checkpointer.recover().step == 1
    assert_same(fresh.state(), at_one)
    assert {record.snapshot for _, record, _ in shard_records(fresh.store)} == {1}
    fresh.checkpointer.close()


@pytest.mark.parametrize("num_commits", range(6))
def test_a_crash_at_any_commit_of_a_new_base_leaves_a_full_recovery_point_with_its_rows(
    tmp_path, monkeypatch, num_commits
):
    """The old point must not outlive the rows it names."""
    tables = {"a": (3000, 8)}
    options = {
        "num_shards": 2,
        "staging": cpr_ext.StagingOptions(slot_bytes=64 << 10),
        "schedule": cpr_ext.EverySteps(1000),
    }
    run = Trained(tmp_path, tables, **options)
    run.train(1)
    run.checkpointer.save("base")  # at one step
    run.checkpointer.wait()
    at_point = run.state()
    step = run.checkpointer.step_count
    commit, left = Manifest.commit, [num_commits]

    def die_after_some(self, segments, seen=None):
        if left[0] == 0:
            raise KeyboardInterrupt("the process died here")
        left[0] -= 1
        commit(self, segments, seen)

    run.train(5)
    snapshot = run.checkpointer._saver.begin("base")
    run.train(2)
    assert snapshot.state == "capturing"
    monkeypatch.setattr(Manifest, "commit", die_after_some)
    monkeypatch.setattr(run.checkpointer._saver._parts.committer, "submit", lambda commit: None)
    while snapshot.state == "capturing":
        run.train(1)
    with suppress(KeyboardInterrupt):
        snapshot.commit()
    monkeypatch.undo()
    run.checkpointer._saver.in_flight = None  # no one is left to finish it
    run.die()
    fresh = Trained(tmp_path, tables, seed=5, **options)
    points = [record for record in fresh.store.dense.segments if record.is_complete]
    if points:
        assert fresh.checkpointer.recover(mode="full").step == step
        assert_same(fresh.state(), at_point)
    else:
        assert num_commits > 2
        report = fresh.checkpointer.recover()
        assert report.rows_restored == 3000
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


@pytest.mark.parametrize("shards", [[99], [-1], [0, NUM_SHARDS]])
def test_a_shard_that_does_not_exist_is_named(tmp_path, shards):
    run = Trained(tmp_path, **OPTIONS)
    run.train(1)
    before = run.state()
    bad = next(shard for shard in shards if not 0 <= shard < NUM_SHARDS)
    with pytest.raises(UsageError, match=f"shard {bad} does not exist; there are 0 to 3"):
        run.checkpointer.recover(shards=shards)
    with pytest.raises(UsageError, match="full recovery goes back with all shards"):
        run.checkpointer.recover(shards=[0], mode="full")
    assert_same(run.state(), before)
    run.checkpointer.close()


def test_copy_state_sees_every_part_of_the_state(tmp_path):
    """The comparisons above rest on it."""
    run = Trained(tmp_path, optimizer="adam")
    run.train(1)
    before = run.state()
    torch.rand(1)
    assert differences(copy_state(run.model, run.optimizers), before) == ["/torch"]
    before = run.state()
    run.optimizers[0].state[run.model.tables["big"].weight]["exp_avg"][3, 1] += 1
    assert differences(run.state(), before) == ["/optimizers/0/state/0/exp_avg"]
    run.checkpointer.close()
