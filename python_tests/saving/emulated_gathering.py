"""Partial snapshots whose rows a GPU copies at one step.

python_tests/test_emulated_gpu.py runs it on the emulated device.
"""

import gc
import threading
import time
import weakref

import pytest
import torch

import cpr_ext
from cpr_ext.saving import snapshot_rows
from cpr_ext.saving.amount import CaptureAmount
from cpr_ext.saving.snapshot_rows import SnapshotRows
from python_tests.emulated_cases import Run, emulator

SMALL = {"slot_bytes": 64 << 10, "num_slots": 2}


def start(directory, when_busy="delay", **options):
    """A run whose base snapshot is saved; its next ones need several slots."""
    staging = cpr_ext.StagingOptions(**SMALL, **options.pop("staging", {}))
    run = Run(
        directory,
        schedule=cpr_ext.EverySteps(1000, when_busy=when_busy),
        priority=cpr_ext.MostFrequentlyUsed(0.6),
        staging=staging,
        **options,
    )
    run.save_base()
    run.checkpointer._saver._rounds_left = 0  # of the base
    run.step(range(2000))
    return run


def is_copied(run):
    """Whether the snapshot in flight is committed from copies on the device."""
    saver = run.checkpointer._saver
    return saver._way == "device copy" and saver.in_flight.is_submitted


@pytest.fixture
def held(monkeypatch):
    """Keeps the copies of a partial snapshot on the device until it is set."""
    may_go = threading.Event()
    finish = SnapshotRows.finish

    def finish_later(rows, num_samples):
        assert rows._kind == "base" or may_go.wait(60)
        return finish(rows, num_samples)

    monkeypatch.setattr(SnapshotRows, "finish", finish_later)
    return may_go


def begin(run, row_ids=range(100)):
    """Step until a partial snapshot begins and knows its step; it, and the weights after each."""
    checkpointer = run.checkpointer
    waits = checkpointer.schedule.when_busy
    checkpointer.schedule = cpr_ext.EverySteps(1, when_busy=waits)
    weights = {}
    for _ in range(20):
        run.step(row_ids)
        checkpointer.schedule = cpr_ext.EverySteps(1000, when_busy=waits)
        weights[checkpointer.step_count] = run.model.weight.detach().clone()
        snapshot = checkpointer._saver.in_flight
        if snapshot is None or snapshot.first_step >= 0:
            break
    return snapshot, weights


def test_all_rows_are_of_one_step_while_training_goes_on_and_waits_for_no_slot(tmp_path, held):
    run = start(tmp_path / "s")
    snapshot, weights = begin(run)
    assert is_copied(run)
    of_step = snapshot.first_step
    for _ in range(5):
        run.step(range(2000))  # the very rows that wait
    assert snapshot.state == "captured", "training waited until all rows were on the host"
    held.set()
    run.checkpointer.wait()
    assert (snapshot.state, snapshot.first_step, snapshot.last_step) == (
        "committed",
        of_step,
        of_step,
    )
    run.checkpointer.close()
    other = Run(tmp_path / "s")
    assert other.checkpointer.recover().step == of_step
    saved = range(2000)
    assert torch.equal(other.model.weight[saved], weights[of_step][saved])
    other.checkpointer.close()


def test_training_waits_for_the_device_a_few_times_however_many_rows_are_chosen(tmp_path, held):
    """More than 4,095 rows of each table: their ids do not come with the number of them."""
    tables = [torch.nn.Embedding(12_000, 16, sparse=True) for _ in range(8)]
    model = torch.nn.ModuleList(tables)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = cpr_ext.EverySteps(1000)
    priority = cpr_ext.MostFrequentlyUsed(0.6)
    with cpr_ext.Checkpointer(
        model, optimizer, tmp_path, schedule=schedule, priority=priority
    ) as checkpointer:

        def train(num_rows):
            optimizer.zero_grad()
            sum(table(torch.arange(num_rows)).sum() for table in tables).backward()
            optimizer.step()
            checkpointer.step()

        train(100)
        checkpointer.save("base")
        checkpointer.wait()
        train(8000)
        checkpointer.schedule = cpr_ext.EverySteps(1)
        emulator.own_calls()
        train(100)
        checkpointer.schedule = schedule
        snapshot = checkpointer._saver.in_flight
        while not snapshot.is_submitted:
            time.sleep(0.001)  # so does a step, in which the ids arrive
            train(100)
        calls = emulator.own_calls()
        assert [each.num_rows for each in snapshot.rows._selections] == [7200] * 8
        held.set()
        checkpointer.wait()
        assert snapshot.state == "committed"
    assert calls["cudaLaunchKernelEx"] > 8
    assert calls.get("cudaEventSynchronize", 0) <= 5


def test_chosen_row_ids_stay_on_the_device_until_the_snapshot_is_saved(tmp_path, monkeypatch):
    run = start(tmp_path / "s")
    copy = snapshot_rows._copies_of_chosen
    copied = []
    monkeypatch.setattr(
        snapshot_rows, "_copies_of_chosen", lambda *given: copied.append(given) or copy(*given)
    )
    snapshot, _ = begin(run)
    assert is_copied(run)
    assert len(copied) == 1
    (selection,) = snapshot.rows._selections
    assert selection.chosen is not None
    run.checkpointer.wait()
    run.step()
    assert snapshot.state == "committed"
    assert selection.chosen is None
    run.checkpointer.close()


def test_a_complete_snapshot_of_one_step_is_of_the_step_that_begins_it(tmp_path):
    run = start(tmp_path / "s")
    run.checkpointer.close()
    run = Run(
        tmp_path / "t",
        schedule=cpr_ext.EverySteps(1000, when_busy="wait"),
        priority=cpr_ext.AllRows(),
        staging=cpr_ext.StagingOptions(**SMALL),
    )
    run.save_base()
    run.checkpointer._saver._rounds_left = 0  # of the base
    run.step(range(1500))
    snapshot, weights = begin(run)
    assert len(weights) == 1
    assert snapshot.is_complete
    run.step(range(1500))
    run.checkpointer.wait()
    run.checkpointer.close()
    other = Run(tmp_path / "t")
    assert other.checkpointer.recover(mode="full").step == snapshot.first_step
    assert torch.equal(other.model.weight, weights[snapshot.first_step])
    other.checkpointer.close()


def test_a_table_that_is_saved_whole_is_copied_too(tmp_path, held):
    """Its rows are captured last, when training has changed them long since."""
    tables = [torch.nn.Embedding(rows, 16, sparse=True) for rows in (20_000, 100)]
    model = torch.nn.ModuleList(tables)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(checkpointer):
        optimizer.zero_grad()
        sum(table(torch.arange(100)).sum() for table in tables).backward()
        optimizer.step()
        checkpointer.step()

    with cpr_ext.Checkpointer(
        model, optimizer, tmp_path, staging=cpr_ext.StagingOptions(**SMALL)
    ) as checkpointer:
        checkpointer.schedule = cpr_ext.EverySteps(1000)
        train(checkpointer)
        checkpointer.save("base")
        checkpointer.wait()
        checkpointer.record_lookups("0", torch.arange(2000))
        checkpointer.schedule = cpr_ext.EverySteps(1)
        train(checkpointer)
        checkpointer.schedule = cpr_ext.EverySteps(1000)
        snapshot = checkpointer._saver.in_flight
        while snapshot.first_step < 0:
            train(checkpointer)
        selections = snapshot.rows._selections
        assert [each.row_ids is None for each in selections] == [False, True]
        expected = [table.weight.detach().clone() for table in tables]
        for _ in range(5):
            train(checkpointer)
        assert snapshot.state == "captured"
        held.set()
        checkpointer.wait()
        assert snapshot.state == "committed"
        assert checkpointer.recover(shards=[0]).step >= snapshot.first_step
        for table, values in zip(tables, expected, strict=True):
            assert torch.equal(table.weight[:100], values[:100])


def no_memory(*given):
    raise torch.cuda.OutOfMemoryError("there is none")


@pytest.mark.parametrize("when_busy", ["delay", "wait"])
@pytest.mark.parametrize("why", ["limit", "no memory", "never"])
def test_without_memory_rows_are_captured_from_the_tables(tmp_path, when_busy, why, monkeypatch):
    monkeypatch.setattr(CaptureAmount, "fits", lambda *_, **__: False)
    if why == "no memory":
        monkeypatch.setattr(snapshot_rows, "_gathered", no_memory)
    staging = {} if why == "no memory" else {"gather_bytes": 0 if why == "never" else 1000}
    run = start(tmp_path / "s", when_busy, staging=staging)
    snapshot, _ = begin(run)
    instead = {"delay": "sweep", "wait": "one step"}[when_busy]
    assert run.checkpointer._saver._way == instead
    if when_busy == "wait":
        assert not snapshot.has_rows_left, "rows of one step wait, and may change"
    run.checkpointer.wait()
    assert snapshot.state == "committed"
    run.checkpointer.close()
    other = Run(tmp_path / "s")
    other.checkpointer.recover()
    assert torch.equal(other.model.weight[:2000], run.model.weight[:2000])
    other.checkpointer.close()


def test_the_copies_are_freed_with_the_snapshot_though_its_handle_is_kept(tmp_path, monkeypatch):
    copies = []
    gathered = snapshot_rows._gathered

    def noted(*given):
        source = gathered(*given)
        copies.extend(weakref.ref(array) for array in source.of.arrays.values())
        return source

    monkeypatch.setattr(snapshot_rows, "_gathered", noted)
    run = start(tmp_path / "s")
    snapshot, _ = begin(run)
    assert copies
    assert all(copy() is not None for copy in copies)
    run.checkpointer.wait()
    run.step()
    gc.collect()
    assert snapshot.state == "committed"
    assert all(copy() is None for copy in copies)
    run.checkpointer.close()


def test_a_device_that_fails_while_it_copies_costs_that_snapshot_only(tmp_path, monkeypatch):
    run = start(tmp_path / "s")
    with monkeypatch.context() as patch:
        patch.setattr(snapshot_rows, "_gathered", lambda *given: 1 / 0)
        with pytest.warns(UserWarning, match="training continues: division by zero"):
            begin(run)
    assert len(run.checkpointer.metrics.failures) == 1
    run.checkpointer.save("partial")
    expected = run.model.weight.detach().clone()
    run.checkpointer.wait()
    run.checkpointer.close()
    other = Run(tmp_path / "s")
    other.checkpointer.recover()
    assert torch.equal(other.model.weight, expected), "rows of the failed snapshot were forgotten"
    other.checkpointer.close()
