"""A snapshot of one step: captured over many steps, exact for its own."""

import pytest
import torch

import cpr_ext
from cpr_ext.saving import selection
from cpr_ext.saving.capture_ways import ChooseFirst
from python_tests.helpers import (
    STILL_OPTIMIZERS,
    Trained,
    assert_same,
    copy_rows,
    differences,
    read_chunks,
    shard_records,
    short_windows,
)
from python_tests.saving.captured import (
    OPTIONS,
    TABLES,
    assert_captured,
    assert_of_one_step,
    train_until_captured,
    wait_for_one_chunk,
)


def begin_partial(run):
    """Take the base snapshot, then begin a partial one, which is still being captured."""
    checkpointer = run.checkpointer
    train_until_captured(run)
    checkpointer.wait()
    checkpointer.schedule = cpr_ext.EverySteps(1)
    run.train(1)
    checkpointer.schedule = cpr_ext.EverySteps(1000)
    return checkpointer._saver.in_flight


@pytest.mark.parametrize("optimizer", STILL_OPTIMIZERS)
@pytest.mark.parametrize("kept_bytes", [2048, 1 << 20])
def test_a_snapshot_of_one_step_is_captured_over_many_and_exact(tmp_path, optimizer, kept_bytes):
    staging = cpr_ext.StagingOptions(slot_bytes=64 << 10, copy_on_write_bytes=kept_bytes)
    options = {**OPTIONS, "staging": staging}
    run = Trained(tmp_path, TABLES, optimizer=optimizer, consistency="step", **options)
    with short_windows():
        rows = train_until_captured(run)
    num_steps = run.checkpointer.step_count
    run.checkpointer.wait()
    assert_captured(run.checkpointer, rows)
    (point,) = run.store.dense.segments
    assert point.is_complete
    base_step = point.last_step
    assert (point.first_step, point.num_samples) == (base_step, 10 * base_step)
    if kept_bytes > 2048:  # else rows are captured to make room
        assert num_steps > base_step + 2
    assert differences(rows[base_step], rows[num_steps])
    assert run.checkpointer._saver._parts.context.pipeline.copied_bytes == 0
    run.checkpointer.close()


def test_rows_that_changed_while_a_snapshot_of_an_earlier_step_was_captured_stay_dirty(tmp_path):
    run = Trained(
        tmp_path, TABLES, consistency="step", priority=cpr_ext.AllRows(), num_shards=1,
        **{k: v for k, v in OPTIONS.items() if k != "num_shards"},
    )  # fmt: skip
    with short_windows():
        train_until_captured(run)
    run.checkpointer.wait()
    (base,) = run.store.dense.segments
    last = run.checkpointer.step_count
    run.checkpointer.save("partial")
    run.checkpointer.wait()
    expected = run.rows()
    run.die()
    fresh = Trained(tmp_path, TABLES, seed=5, consistency="step", priority=cpr_ext.AllRows(),
                    overlap="never", staging=OPTIONS["staging"])  # fmt: skip
    report = fresh.checkpointer.recover()
    assert report.step == last > base.last_step
    assert_same(fresh.rows(), expected)
    fresh.checkpointer.close()


def test_rows_of_a_partial_snapshot_of_one_step_are_chosen_before_it_is_held(tmp_path):
    """No step() reads all counts: the rows are chosen while training runs, and held after that."""
    run = Trained(
        tmp_path, TABLES, consistency="step", priority=cpr_ext.MostFrequentlyUsed(0.01), **OPTIONS
    )
    checkpointer = run.checkpointer
    rows = {}
    with short_windows():
        snapshot = begin_partial(run)
        assert snapshot.kind == "partial"
        began = checkpointer.step_count
        while isinstance(checkpointer._saver._way, ChooseFirst):
            # A table of a shard is chosen in every window that is long enough; at the latest in the
            # fourth.
            assert snapshot.state == "capturing", snapshot.error
            run.train(1)
            rows[checkpointer.step_count] = copy_rows(checkpointer.tables)
        held = checkpointer.step_count
        assert 2 * len(TABLES) <= held - began <= 4 * 2 * len(TABLES)
        run.train(1)
    checkpointer.wait()
    assert (snapshot.first_step, snapshot.last_step, snapshot.num_samples) == (
        held,
        held,
        10 * held,
    )
    partial = [path for _, record, path in shard_records(run.store) if record.kind == "partial"]
    assert len(partial) == 2
    for path in partial:
        for chunk in read_chunks(path):
            assert chunk.step == held
            for name, array in chunk.arrays.items():
                assert torch.equal(
                    torch.as_tensor(array), rows[held][chunk.table][name][chunk.row_ids]
                )
    checkpointer.close()


def test_a_snapshot_waited_for_before_its_rows_are_chosen_is_of_the_step_it_is_waited_for(
    tmp_path, monkeypatch
):
    run = Trained(
        tmp_path, TABLES, consistency="step", priority=cpr_ext.MostFrequentlyUsed(0.01), **OPTIONS
    )
    with short_windows():
        train_until_captured(run)
        run.checkpointer.wait()
        run.checkpointer.schedule = cpr_ext.EverySteps(1)
        with monkeypatch.context() as patched:  # the capture thread chooses none
            overlap = run.checkpointer._saver._overlap
            patched.setattr(overlap, "resume", lambda snapshot, step: None)
            run.train(2)
        snapshot = run.checkpointer._saver.in_flight
        assert isinstance(run.checkpointer._saver._way, ChooseFirst)
        assert snapshot.first_step == -1  # no step yet
        run.checkpointer.wait()
    assert snapshot.first_step == snapshot.last_step == run.checkpointer.step_count
    assert snapshot.state == "committed"
    run.checkpointer.close()


@pytest.mark.parametrize("num_waits", [1, 3])
def test_a_wait_that_runs_out_leaves_all_rows_of_a_snapshot_of_one_step(
    tmp_path, monkeypatch, num_waits
):
    """The rows that the wait captured, and those that later steps capture, are of one step."""
    run = Trained(
        tmp_path, TABLES, consistency="step", priority=cpr_ext.MostFrequentlyUsed(0.5), **OPTIONS
    )
    checkpointer = run.checkpointer
    with short_windows():
        snapshot = begin_partial(run)
        assert (snapshot.kind, snapshot.state) == ("partial", "capturing")
        rows = {checkpointer.step_count: run.rows()}
        for _ in range(num_waits):
            assert wait_for_one_chunk(checkpointer, monkeypatch) is False
        assert snapshot.rows.bytes_captured > 0
        assert snapshot.state == "capturing"
        rows.update(train_until_captured(run))
    assert checkpointer.wait()
    _, partial = run.store.dense.segments
    assert_of_one_step(run.store, partial, rows)
    checkpointer.close()


@pytest.mark.parametrize("doubtful", ["small", "large"])
def test_rows_that_were_not_chosen_are_found_without_reading_all_counts(
    tmp_path, monkeypatch, doubtful
):
    """In a table whose budget was used up, else in the largest: training waits."""
    tables = {"small": (100_000, 2), "large": (500_000, 2), "other": (300_000, 2)}
    run = Trained(tmp_path, tables, priority=cpr_ext.MostFrequentlyUsed(0.01), consistency="step")
    ckpt, read = run.checkpointer, []
    selector = ckpt._saver._parts.context.selector
    run.train(1)
    for _ in range(4):  # PyTorch's counters are known then
        ckpt.save("base")
        run.train(1)
        ckpt.wait()
    if doubtful == "small":
        ckpt.record_lookups("tables.small", torch.arange(1500))
    ckpt._recorder.flush()
    selections = [selector.partial(number, 0) for number in range(3)]
    used_up = [each.num_rows == 1000 for each in selections]
    assert used_up == [doubtful == "small", False, False]
    has_all = selection._has_all_dirty_rows
    monkeypatch.setattr(
        selection, "_has_all_dirty_rows", lambda each: read.append(each.table.name) or has_all(each)
    )
    if doubtful == "large":
        assert selector.are_complete(selections, is_captured=False)
        assert read == ["tables.large", "tables.other", "tables.small"]
        ckpt.record_lookups("tables.large", torch.tensor([499_999]))
        ckpt._recorder.flush()
        read.clear()
    assert not selector.are_complete(selections, is_captured=False)
    assert read == [f"tables.{doubtful}"]
    ckpt.close()
