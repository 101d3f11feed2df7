"""Partial recovery touches only what was lost; full recovery goes back to a single step."""

import pytest
import torch

import cpr_ext
from cpr_ext.errors import UsageError
from python_tests.helpers import (
    TABLE_OPTIMIZERS,
    Trained,
    assert_same,
    build,
    differences,
    make_indices,
    train_step,
)
from python_tests.recovery.losses import NUM_SHARDS, OPTIONS, shard_range, wipe

SMALL = cpr_ext.StagingOptions(slot_bytes=64 << 10)


@pytest.mark.parametrize("optimizer", sorted(TABLE_OPTIMIZERS))
@pytest.mark.parametrize("lost", [[3], [1, 2]])
def test_partial_recovery_leaves_everything_but_the_lost_rows_bit_identical(
    tmp_path, optimizer, lost
):
    run = Trained(tmp_path, optimizer=optimizer, **OPTIONS)
    run.train(8)
    run.checkpointer.wait()
    before, position = run.state(), (run.checkpointer.step_count, run.checkpointer.num_samples)
    rows_before = run.rows()
    wipe(run, lost)
    report = run.checkpointer.recover(shards=lost)
    assert report.shards == tuple(lost)
    assert (report.step, report.num_samples) == position
    assert position == (run.checkpointer.step_count, run.checkpointer.num_samples)
    # Put the lost rows back by hand: nothing else may differ.
    for table in run.checkpointer.tables:
        for name, now in table.arrays().items():
            for shard in lost:
                rows = shard_range(table, shard)
                assert not (now[rows] == 7).all() or now[rows].numel() == 0
                with torch.no_grad():
                    now[rows] = rows_before[table.name][name][rows]
    assert_same(run.state(), before)


@pytest.mark.parametrize("lost", range(NUM_SHARDS))
def test_partial_recovery_needs_no_file_but_those_of_rows(tmp_path, lost):
    run = Trained(tmp_path, **OPTIONS)
    run.train(8)
    run.save("base")
    before = run.state()
    wipe(run, [lost])
    assert differences(run.state(), before)
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "LOCK" and "-base" not in path.name:
            path.write_bytes(b"garbage")
    report = run.checkpointer.recover(shards=[lost])
    assert (report.damaged_segments, report.rows_stale, report.samples_lost) == ([], 0, 0)
    assert report.segments_read == 1
    assert_same(run.state(), before)
    run.checkpointer._release()


def test_a_base_given_up_for_a_recovery_is_taken_again_if_the_state_arrays_had_changed(tmp_path):
    """Partial snapshots over a base without their state arrays would leave most rows without."""
    options = {"tables": {"a": (3000, 8)}, "optimizer": "adam", "num_shards": 2}
    run = Trained(tmp_path, staging=SMALL, schedule=cpr_ext.EverySteps(1), **options)
    run.save("base")  # before Adam has any state
    run.train(1)
    assert run.checkpointer._saver.in_flight.kind == "base"
    run.checkpointer.recover(shards=[0])
    run.train(30)
    run.checkpointer.wait()
    run.die()
    fresh = Trained(tmp_path, seed=1, **options)
    fresh.checkpointer.recover()
    newest = [record for record in fresh.store.manifest.rows if record.kind == "base"][-1]
    assert newest.snapshot > 1
    fresh.train(1)


def test_optimizer_state_that_appears_during_a_capture_does_not_break_the_recovered_optimizer(
    tmp_path,
):
    """A table looked up for the first time while a base is on its way gets its state then."""

    def make(seed):
        model, _ = build({"a": (6000, 8), "b": (500, 8)}, "sparse_adam", seed=seed)
        return model, [torch.optim.SparseAdam(model.tables.parameters())]

    def train(model, optimizers, checkpointer, names):
        generator = torch.Generator().manual_seed(checkpointer.step_count)
        indices = make_indices(model, generator, 20)
        train_step(model, optimizers, {name: indices[name] for name in names}, generator)
        checkpointer.step()

    model, optimizers = make(0)
    options = {"staging": SMALL, "num_shards": 3, "schedule": cpr_ext.EverySteps(1000)}
    checkpointer = cpr_ext.Checkpointer(model, optimizers, tmp_path, **options)
    train(model, optimizers, checkpointer, ["a"])
    assert checkpointer._saver.in_flight.state == "capturing"
    while checkpointer.metrics.base_snapshots == 0:
        train(model, optimizers, checkpointer, ["a", "b"])
        assert checkpointer.step_count < 50_000  # a busy machine writes late
    checkpointer.wait()
    names = {table.name: table.array_names() for table in checkpointer.tables}
    checkpointer.close(save=False)
    fresh, fresh_optimizers = make(1)
    again = cpr_ext.Checkpointer(fresh, fresh_optimizers, tmp_path, **options)
    again.recover()
    assert {table.name: table.array_names() for table in again.tables} == names
    train(fresh, fresh_optimizers, again, ["a", "b"])


def test_rows_of_a_step_that_training_goes_back_behind_are_not_dirty(tmp_path):
    run = Trained(tmp_path, **OPTIONS)
    run.train(1)
    with run.checkpointer.writing_rows("tables.big", torch.tensor([7, 8])):
        pass
    run.checkpointer.recover()
    assert run.checkpointer._trackers["tables.big"].num_dirty(0, 200) == 0
    run.checkpointer.close()


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


def test_the_position_is_known_before_there_is_a_model(tmp_path):
    assert cpr_ext.position(tmp_path / "none").step == 0
    run = Trained(tmp_path / "store", state={"file": lambda: 7}, **OPTIONS)
    assert cpr_ext.position(tmp_path / "store").step == 0
    run.train(3)
    run.save("base")
    run.train(2)
    run.save()
    there = cpr_ext.position(tmp_path / "store")
    assert (there.step, there.values) == (5, {"file": 7})
    assert there.num_samples == run.checkpointer.num_samples
    (newest,) = (tmp_path / "store" / "segments").glob(f"*{run.store.last_snapshot}-dense*")
    newest.write_bytes(b"garbage")
    assert cpr_ext.position(tmp_path / "store").step < 5
