"""Capture on a thread of its own: exact while training goes on, and aborted where it cannot be."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cpr_ext
from cpr_ext.checkpointer import dense_capture
from cpr_ext.errors import SnapshotFailedWarning
from cpr_ext.saving.amount import CaptureAmount
from cpr_ext.tracking.inventory import Inventory
from python_tests.helpers import (
    Trained,
    copy_rows,
    differences,
    make_indices,
    open_checkpointer,
    short_windows,
    train_step,
)
from python_tests.saving.captured import OPTIONS, TABLES, assert_captured, train_until_captured


@given(
    micro_batches=st.lists(st.integers(1, 3), min_size=4, max_size=10),
    step_per_micro_batch=st.booleans(),
    sparse=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_gradient_accumulation_is_exact(
    tmp_path_factory, micro_batches, step_per_micro_batch, sparse, seed
):
    torch.manual_seed(seed)
    table = nn.Embedding(2000, 8, sparse=sparse)
    model = nn.Sequential(table, nn.Linear(8, 1))
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
    dense = torch.optim.SGD(model[1].parameters(), lr=0.1)
    checkpointer = open_checkpointer(
        model,
        [optimizer, dense],
        tmp_path_factory.mktemp("store"),
        overlap="always",
        schedule=cpr_ext.EverySteps(1000),
        staging=cpr_ext.StagingOptions(slot_bytes=36 << 10),
    )
    rows = {}
    with short_windows():
        for count in micro_batches:
            for _ in range(count):
                model(torch.randint(0, 2000, (50,))).sum().backward()
                if step_per_micro_batch:
                    rows[checkpointer.step_count + 1] = copy_rows(checkpointer.tables)
                    checkpointer.step()
            for each in (optimizer, dense):
                each.step()
                each.zero_grad()
            rows[checkpointer.step_count + 1] = copy_rows(checkpointer.tables)
            checkpointer.step()
    checkpointer.wait()
    assert checkpointer.metrics.failed_snapshots == 0
    assert_captured(checkpointer, rows)
    checkpointer.close()


def test_rows_that_change_without_a_lookup_are_captured_as_they_were(tmp_path):
    """A weight tied to a linear layer gets gradients in every row, looked up or not."""
    torch.manual_seed(0)
    table, linear = nn.Embedding(5000, 8), nn.Linear(8, 5000, bias=False)
    linear.weight = table.weight
    # The looked-up rows' gradients are 10,000 times as large as the rows.
    optimizer = torch.optim.SGD(table.parameters(), lr=1e-5)
    checkpointer = open_checkpointer(
        nn.Sequential(table, linear), optimizer, tmp_path, overlap="always",
        staging=cpr_ext.StagingOptions(slot_bytes=36 << 10), schedule=cpr_ext.EverySteps(1000),
    )  # fmt: skip
    rows = {}
    with short_windows():
        for _ in range(5):
            linear(table(torch.randint(0, 100, (3,)))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            rows[checkpointer.step_count + 1] = copy_rows(checkpointer.tables)
            checkpointer.step()
    checkpointer.wait()
    assert differences(rows[1], rows[5])
    assert_captured(checkpointer, rows)
    checkpointer.close()


def test_an_optimizer_fused_into_backward_is_exact(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(2000, 8), nn.Embedding(900, 8)])
    optimizers = [torch.optim.Adagrad([table.weight], lr=0.1) for table in model]
    for table, optimizer in zip(model, optimizers, strict=True):

        def update(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        table.weight.register_post_accumulate_grad_hook(update)
    checkpointer = open_checkpointer(
        model, optimizers, tmp_path, overlap="always",
        schedule=cpr_ext.EverySteps(1000), staging=cpr_ext.StagingOptions(slot_bytes=36 << 10),
    )  # fmt: skip
    rows = {}
    with short_windows():
        for _ in range(12):
            sum(table(torch.randint(0, 900, (60,))).sum() for table in model).backward()
            rows[checkpointer.step_count + 1] = copy_rows(checkpointer.tables)
            checkpointer.step()
    checkpointer.wait()
    assert_captured(checkpointer, rows)
    assert checkpointer.metrics.failed_snapshots == 0
    checkpointer.close()


@pytest.mark.parametrize("fits", [False, True])
def test_a_change_outside_the_optimizer_costs_the_snapshot_and_is_told(tmp_path, monkeypatch, fits):
    monkeypatch.setattr(CaptureAmount, "fits", lambda *_, **__: fits)
    run = Trained(tmp_path, TABLES, **OPTIONS)
    with short_windows():
        run.train(1 if fits else 2)
        assert run.checkpointer._saver.in_flight.state == "capturing"
        with torch.no_grad():
            run.model.tables["a"].weight[5] = 1.0  # while the window is open
        with pytest.warns(SnapshotFailedWarning, match=r"'tables\.a' was changed outside"):
            run.train(1)
    assert run.store.is_empty
    # From here on training waits for every capture, which no change can spoil.
    run.checkpointer.save()
    run.checkpointer.wait()
    assert_captured(run.checkpointer, {run.checkpointer.step_count: run.rows()})
    run.checkpointer.close()


def test_weights_may_be_clipped_after_the_optimizers_step_in_a_snapshot_over_many_steps(tmp_path):
    run = Trained(tmp_path, TABLES, **OPTIONS)
    clip = run.optimizers[0].register_step_post_hook(
        lambda *_: [t.weight.data.clamp_(-1, 1) for t in run.model.tables.values()]
    )
    with short_windows():
        rows = train_until_captured(run)
    run.checkpointer.wait()
    assert_captured(run.checkpointer, rows)
    clip.remove()
    run.checkpointer.close()


def test_a_compiled_optimizer_step_is_not_captured_torn(tmp_path):
    """Whether the hooks run inside a compiled step or not, what is committed is exact."""
    run = Trained(tmp_path, TABLES, optimizer="sgd", **OPTIONS)
    optimizer = run.optimizers[0]
    plain = type(optimizer).step
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    saved = [dict(hook) for hook in hooks]
    for hook in hooks:
        hook.clear()  # as if the step had been compiled without them
    with short_windows(), pytest.warns(SnapshotFailedWarning, match="changed outside"):
        run.train(3)
    for hook, old in zip(hooks, saved, strict=True):
        hook.update(old)
    assert type(optimizer).step is plain
    run.checkpointer.save("base")
    run.checkpointer.wait()
    assert_captured(run.checkpointer, {run.checkpointer.step_count: run.rows()})
    run.checkpointer.close()


def test_tables_that_cannot_be_captured_meanwhile_are_captured_in_step(tmp_path):
    torch.manual_seed(0)
    for name, model, optimize in (
        ("none", nn.Embedding(50, 4), False),
        ("norm", nn.Embedding(50, 4, max_norm=1.0), True),
    ):
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)] if optimize else []
        plain = open_checkpointer(model, optimizers, tmp_path / name, overlap="always")
        assert plain._saver._overlap is None
        model(torch.arange(5)).sum().backward()
        plain.step()
        plain.wait()
        assert not plain.store.is_empty
        plain.close()


def test_a_lost_shard_is_recovered_while_a_snapshot_is_being_captured(tmp_path):
    run = Trained(tmp_path, TABLES, **OPTIONS)
    with short_windows():
        train_until_captured(run)
        run.checkpointer.wait()
        run.checkpointer.schedule = cpr_ext.EverySteps(1)
        run.train(1)
        assert run.checkpointer._saver.in_flight.state == "capturing"
        run.checkpointer._saver.pause()  # else NaN may be captured, and the snapshot refused
        with torch.no_grad():
            for table in run.model.tables.values():
                table.weight[: table.num_embeddings // 2] = float("nan")
        report = run.checkpointer.recover(shards=[0])
        assert report.rows_restored == sum(rows // 2 for rows, _ in TABLES.values())
        run.train(4)
    run.checkpointer.wait()
    assert run.checkpointer.metrics.failed_snapshots == 0
    run.checkpointer.close()


def test_the_capturing_thread_and_the_hooks_end_with_the_checkpointer(tmp_path):
    run = Trained(tmp_path, TABLES, **OPTIONS)
    optimizer = run.optimizers[0]
    run.train(2)
    assert any(thread.name == "cpr_ext-capture" for thread in threading.enumerate())
    run.checkpointer.close()
    assert not any(thread.name == "cpr_ext-capture" for thread in threading.enumerate())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    run.model(  # training goes on as if nothing had been there
        {name: torch.arange(3) for name in TABLES}, torch.zeros(3, 4)
    ).backward()
    optimizer.step()


def test_the_time_that_the_hooks_hold_training_counts_as_stall(tmp_path, monkeypatch):
    monkeypatch.setattr(CaptureAmount, "fits", lambda *_, **__: True)
    run = Trained(tmp_path, TABLES, **OPTIONS)
    with short_windows():
        run.train(1)
        capture = run.checkpointer._saver.in_flight.capture_rows
        monkeypatch.setattr(
            run.checkpointer._saver.in_flight,
            "capture_rows",
            lambda *arguments, **options: (time.sleep(0.1), capture(*arguments, **options))[1],
        )
        run.train(1)
    assert run.checkpointer.metrics.max_stall_seconds >= 0.1
    run.checkpointer.close()


def test_a_table_in_a_larger_piece_of_memory_is_captured_in_step(tmp_path):
    """Its owner, such as FSDP, may take the memory away while another thread reads it."""
    model = nn.Embedding(50, 4)
    model.weight = nn.Parameter(torch.zeros(400)[:200].view(50, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with open_checkpointer(model, optimizer, tmp_path / "y", overlap="always") as plain:
        assert plain._saver._overlap is None


def test_no_step_waits_for_rows_and_copies_the_dense_part_of_a_snapshot_over_many_steps(
    tmp_path, monkeypatch
):
    run = Trained(tmp_path, TABLES, **OPTIONS)
    saver, log = run.checkpointer._saver, []
    for place, name in ((dense_capture, "capture_dense"), (Inventory, "look")):
        monkeypatch.setattr(place, name, noting(log, getattr(place, name)))
    with short_windows():
        run.train(1)
        snapshot = saver.in_flight
        while snapshot.state == "capturing":
            log.append(f"rows left: {snapshot.has_rows_left}")
            run.train(1)
    # What no row holds is looked up as of the same step.
    assert log[-3:] == ["rows left: False", "look", "capture_dense"]
    assert log.count("capture_dense") == 1
    run.checkpointer.close()


def test_a_snapshot_of_one_step_has_the_dense_part_first_and_waits_for_its_rows(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(CaptureAmount, "fits", lambda *_, **__: True)
    run = Trained(tmp_path, TABLES, optimizer="adam", **OPTIONS)
    with short_windows():
        run.train(1)
        snapshot, rows = run.checkpointer._saver.in_flight, run.rows()
        assert snapshot.first_step == snapshot.last_step == 1
        assert snapshot.has_rows_left
        generator = torch.Generator().manual_seed(3)
        indices = make_indices(run.model, generator, 30)
        train_step(run.model, run.optimizers, indices, generator)
        assert not snapshot.has_rows_left
        assert run.checkpointer._saver.in_flight is snapshot
    run.checkpointer.wait()
    assert_captured(run.checkpointer, {1: rows})
    run.checkpointer.close()


def noting(log, method):
    def note(*arguments, **options):
        log.append(method.__name__)
        return method(*arguments, **options)

    return note
