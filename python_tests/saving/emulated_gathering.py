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
NEVER = cpr_ext.EverySteps(1000)


def start(directory, when_busy="delay", priority=None, rows=2000, **staging):
    """A run whose base snapshot is saved; its next ones need several slots."""
    run = Run(
        directory,
        schedule=cpr_ext.EverySteps(1000, when_busy=when_busy),
        priority=priority or cpr_ext.MostFrequentlyUsed(0.6),
        staging=cpr_ext.StagingOptions(**SMALL, **staging),
    )
    run.save_base()
    run.checkpointer._saver._rounds_left = 0  # of the base
    run.step(range(rows))
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


def begin(run):
    """Step until a partial snapshot begins and knows its step; it, and the weights after each."""
    checkpointer = run.checkpointer
    waits = checkpointer.schedule.when_busy
    checkpointer.schedule = cpr_ext.EverySteps(1, when_busy=waits)
    weights = {}
    for _ in range(20):
        run.step(range(100))
        checkpointer.schedule = cpr_ext.EverySteps(1000, when_busy=waits)
        weights[checkpointer.step_count] = run.model.weight.detach().clone()
        snapshot = checkpointer._saver.in_flight
        if snapshot is None or snapshot.first_step >= 0:
            break
    return snapshot, weights


def recovered(run, directory, **options):
    """The step and the weights that another process recovers."""
    run.checkpointer.wait()
    run.checkpointer.close()
    other = Run(directory)
    step = other.checkpointer.recover(**options).step
    other.checkpointer.close()
    return step, other.model.weight


def test_all_rows_are_of_one_step_while_training_goes_on_and_waits_for_no_slot(tmp_path, held):
    run = start(tmp_path)
    snapshot, weights = begin(run)
    assert is_copied(run)
    of_step = snapshot.first_step
    for _ in range(5):
        run.step(range(2000))  # the very rows that wait
    assert snapshot.state == "captured", "training waited until all rows were on the host"
    held.set()
    step, found = recovered(run, tmp_path)
    assert (snapshot.state, snapshot.first_step, snapshot.last_step) == ("committed", step, step)
    assert step == of_step
    assert torch.equal(found[:2000], weights[of_step][:2000])


class Tables:
    """Some tables in training, of which the base is saved."""

    def __init__(self, directory, sizes, **options):
        self.tables = [torch.nn.Embedding(rows, 16, sparse=True) for rows in sizes]
        model = torch.nn.ModuleList(self.tables)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.ckpt = cpr_ext.Checkpointer(
            model, self.optimizer, directory, schedule=NEVER, **options
        )
        self.train(100)
        self.ckpt.save("base")
        self.ckpt.wait()

    def train(self, num_rows=100):
        self.optimizer.zero_grad()
        sum(table(torch.arange(num_rows)).sum() for table in self.tables).backward()
        self.optimizer.step()
        self.ckpt.step()

    def begin(self):
        self.ckpt.schedule = cpr_ext.EverySteps(1)
        self.train()
        self.ckpt.schedule = NEVER
        return self.ckpt._saver.in_flight


def test_training_waits_for_the_device_a_few_times_however_many_rows_are_chosen(tmp_path, held):
    """More than 4,095 rows of each table: their ids do not come with the number of them."""
    run = Tables(tmp_path, [12_000] * 8, priority=cpr_ext.MostFrequentlyUsed(0.6))
    run.train(8000)
    emulator.own_calls()
    snapshot = run.begin()
    while not snapshot.is_submitted:
        time.sleep(0.001)  # so does a step, in which the ids arrive
        run.train()
    calls = emulator.own_calls()
    assert [each.num_rows for each in snapshot.rows._selections] == [7200] * 8
    held.set()
    run.ckpt.wait()
    assert snapshot.state == "committed"
    assert calls["cudaLaunchKernelEx"] > 8
    assert calls.get("cudaEventSynchronize", 0) <= 5


def test_a_table_that_is_saved_whole_is_copied_too(tmp_path, held):
    """Its rows are captured last, when training has changed them long since."""
    run = Tables(tmp_path, (20_000, 100), staging=cpr_ext.StagingOptions(**SMALL))
    with run.ckpt.writing_rows("0", torch.arange(2000)):
        pass
    snapshot = run.begin()
    while snapshot.first_step < 0:
        run.train()
    assert [each.row_ids is None for each in snapshot.rows._selections] == [False, True]
    expected = [table.weight.detach().clone() for table in run.tables]
    for _ in range(5):
        run.train()
    assert snapshot.state == "captured"
    held.set()
    run.ckpt.wait()
    assert snapshot.state == "committed"
    assert run.ckpt.recover(shards=[0]).step >= snapshot.first_step
    for table, values in zip(run.tables, expected, strict=True):
        assert torch.equal(table.weight[:100], values[:100])


def test_row_ids_and_copies_on_the_device_are_freed_with_the_snapshot_though_its_handle_is_kept(
    tmp_path, monkeypatch
):
    copies, chosen = [], []
    gathered, of_chosen = snapshot_rows._gathered, snapshot_rows._copies_of_chosen

    def noted(*given):
        source = gathered(*given)
        copies.extend(weakref.ref(array) for array in source.of.arrays.values())
        return source

    monkeypatch.setattr(snapshot_rows, "_gathered", noted)
    monkeypatch.setattr(
        snapshot_rows, "_copies_of_chosen", lambda *given: chosen.append(given) or of_chosen(*given)
    )
    run = start(tmp_path)
    snapshot, _ = begin(run)
    assert is_copied(run)
    assert len(chosen) == 1
    chosen.clear()
    (selection,) = snapshot.rows._selections
    assert selection.chosen is not None
    assert copies
    assert all(copy() is not None for copy in copies)
    run.checkpointer.wait()
    run.step()
    gc.collect()
    assert snapshot.state == "committed"
    assert selection.chosen is None
    assert all(copy() is None for copy in copies)
    run.checkpointer.close()


def test_a_complete_snapshot_of_one_step_is_of_the_step_that_begins_it(tmp_path):
    run = start(tmp_path, "wait", cpr_ext.AllRows(), rows=1500)
    snapshot, weights = begin(run)
    assert len(weights) == 1
    assert snapshot.is_complete
    run.step(range(1500))
    step, found = recovered(run, tmp_path, mode="full")
    assert step == snapshot.first_step
    assert torch.equal(found, weights[step])


def no_memory(*given):
    raise torch.cuda.OutOfMemoryError("there is none")


@pytest.mark.parametrize("when_busy", ["delay", "wait"])
@pytest.mark.parametrize("why", ["limit", "no memory", "never"])
def test_without_memory_rows_are_captured_from_the_tables(tmp_path, when_busy, why, monkeypatch):
    monkeypatch.setattr(CaptureAmount, "fits", lambda *_, **__: False)
    if why == "no memory":
        monkeypatch.setattr(snapshot_rows, "_gathered", no_memory)
    staging = {} if why == "no memory" else {"gather_bytes": 0 if why == "never" else 1000}
    run = start(tmp_path, when_busy, **staging)
    snapshot, _ = begin(run)
    instead = {"delay": "sweep", "wait": "one step"}[when_busy]
    assert run.checkpointer._saver._way == instead
    if when_busy == "wait":
        assert not snapshot.has_rows_left, "rows of one step wait, and may change"
    _, found = recovered(run, tmp_path)
    assert snapshot.state == "committed"
    assert torch.equal(found[:2000], run.model.weight[:2000])
