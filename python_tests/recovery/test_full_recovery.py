"""Full recovery goes back to a single step."""

import pytest

import cpr_ext
from cpr_ext import Retention, StoreOptions
from cpr_ext.errors import StoreError
from cpr_ext.wings.tools.maintenance import inspect
from python_tests.helpers import Trained, assert_same, row_records
from python_tests.recovery.losses import OPTIONS


def test_full_recovery_without_a_full_recovery_point_says_so_and_changes_nothing(tmp_path):
    staging, never = cpr_ext.StagingOptions(slot_bytes=64 << 10), cpr_ext.EverySteps(100)
    run = Trained(tmp_path, {"a": (6000, 8)}, staging=staging, schedule=never)
    run.train(1)  # of a base captured over several steps
    assert run.store.is_empty
    for mode in ("full", "partial"):
        with pytest.raises(StoreError, match="nothing"):
            run.checkpointer.recover(mode=mode)
    run.train(2)
    run.checkpointer.wait()
    before, segments = run.state(), [record for record, _ in row_records(run.store)]
    assert not run.store.manifest.dense[-1].is_complete
    with pytest.raises(StoreError, match=r"no full-recovery point.*AllRows"):
        run.checkpointer.recover(mode="full")
    assert_same(run.state(), before)
    assert [record for record, _ in row_records(run.store)] == segments
    run.train(1)
    run.checkpointer.close()


def test_rows_that_momentum_moves_keep_a_snapshot_from_being_a_full_recovery_point(tmp_path):
    run = Trained(tmp_path, {"a": (100, 4)}, optimizer="sgd_momentum", **OPTIONS)
    run.train(1)
    run.train(3)
    run.checkpointer.wait()
    assert run.store.manifest.dense[-1].last_step == 4
    assert [record.is_complete for record in run.store.manifest.dense] == [True, False]
    run.checkpointer.close()


def test_recovery_reaches_each_full_recovery_point_that_is_kept(tmp_path):
    retention = Retention(full_recovery_points=3)
    options = {**OPTIONS, "priority": cpr_ext.AllRows(), "store": StoreOptions(retention=retention)}
    run = Trained(tmp_path, **options)
    states = {}
    for _ in range(14):
        run.train(1)
        states[run.checkpointer.step_count] = run.state()
    run.checkpointer.close()
    points = [p.step for p in inspect(tmp_path).points if p.is_full_recovery_point]
    assert len(points) == 3
    for number, step in enumerate(reversed(points)):
        fresh = Trained(tmp_path, seed=number + 3, **options)
        with pytest.raises(StoreError, match=f"of step 999.*{points[0]}"):
            fresh.checkpointer.recover(at_step=999)
        with pytest.raises(cpr_ext.UsageError, match="at_step"):
            fresh.checkpointer.recover(at_step=step, up_to_step=step)
        assert fresh.checkpointer.recover(at_step=step).step == step
        assert_same(fresh.state(), states[step])
        fresh.checkpointer.close()
    assert [p.step for p in inspect(tmp_path).points] == points[:1]
