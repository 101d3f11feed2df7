"""Capture on a thread of its own: exact while training goes on, and aborted where it cannot be."""

import threading
import time

import pytest
import torch
from torch import nn

from cpr_ext.checkpointer import dense_capture
from cpr_ext.errors import SnapshotFailedWarning
from cpr_ext.saving.amount import CaptureAmount
from cpr_ext.tracking.inventory import Inventory
from python_tests.helpers import (
    Trained,
    make_indices,
    open_checkpointer,
    short_windows,
    train_step,
)
from python_tests.saving.captured import OPTIONS, TABLES, assert_captured, train_until_captured


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
    run.save()
    assert_captured(run.checkpointer, {run.checkpointer.step_count: run.rows()})


def test_weights_may_be_clipped_after_the_optimizers_step_in_a_snapshot_over_many_steps(tmp_path):
    run = Trained(tmp_path, TABLES, **OPTIONS)
    run.optimizers[0].register_step_post_hook(
        lambda *_: [t.weight.data.clamp_(-1, 1) for t in run.model.tables.values()]
    )
    with short_windows():
        rows = train_until_captured(run)
    run.checkpointer.wait()
    assert_captured(run.checkpointer, rows)
    run.checkpointer.close()


def test_tables_that_cannot_be_captured_meanwhile_are_captured_in_step(tmp_path):
    part = nn.Embedding(50, 4)  # its owner, such as FSDP, may take the memory away
    part.weight = nn.Parameter(torch.zeros(400)[:200].view(50, 4))
    norm = nn.Embedding(50, 4, max_norm=1.0)
    for number, (model, is_trained) in enumerate(
        [(part, True), (norm, True), (nn.Embedding(50, 4), False)]
    ):
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)] if is_trained else []
        plain = open_checkpointer(model, optimizers, tmp_path / str(number), overlap="always")
        assert plain._saver._overlap is None
        model(torch.arange(5)).sum().backward()
        plain.step()
        plain.wait()
        assert not plain.store.is_empty
        plain.close()


def test_the_capturing_thread_and_the_hooks_end_with_the_checkpointer(tmp_path):
    before = threading.enumerate()  # those of other tests may end later
    run = Trained(tmp_path, TABLES, **OPTIONS)
    optimizer = run.optimizers[0]
    run.train(2)
    own = [t for t in threading.enumerate() if t.name == "cpr_ext-capture" and t not in before]
    run.checkpointer.close()
    assert [thread.is_alive() for thread in own] == [False]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    indices = {name: torch.arange(3) for name in TABLES}
    run.model(indices, torch.zeros(3, 4)).backward()  # as if nothing had been there
    optimizer.step()


def test_a_snapshot_of_one_step_has_the_dense_part_first_and_waits_for_its_rows(
    tmp_path, monkeypatch
):
    """The time that the hooks hold training counts as stall."""
    monkeypatch.setattr(CaptureAmount, "fits", lambda *_, **__: True)
    run = Trained(tmp_path, TABLES, optimizer="adam", **OPTIONS)
    with short_windows():
        run.train(1)
        snapshot, rows = run.checkpointer._saver.in_flight, run.rows()
        assert snapshot.first_step == snapshot.last_step == 1
        assert snapshot.has_rows_left
        capture = snapshot.capture_rows
        monkeypatch.setattr(
            snapshot,
            "capture_rows",
            lambda *given, **options: (time.sleep(0.1), capture(*given, **options))[1],
        )
        generator = torch.Generator().manual_seed(3)
        indices = make_indices(run.model, generator, 30)
        train_step(run.model, run.optimizers, indices, generator)
        assert not snapshot.has_rows_left
        assert run.checkpointer._saver.in_flight is snapshot
        run.checkpointer.step()
    assert run.checkpointer.metrics.max_stall_seconds >= 0.1
    run.checkpointer.wait()
    assert_captured(run.checkpointer, {1: rows})
    run.checkpointer.close()


def test_no_step_waits_for_rows_and_copies_the_dense_part_of_a_snapshot_over_many_steps(
    tmp_path, monkeypatch
):
    run, log = Trained(tmp_path, TABLES, **OPTIONS), []

    def noting(method):
        def note(*arguments, **options):
            log.append(method.__name__)
            return method(*arguments, **options)

        return note

    for place, name in ((dense_capture, "capture_dense"), (Inventory, "look")):
        monkeypatch.setattr(place, name, noting(getattr(place, name)))
    with short_windows():
        run.train(1)
        snapshot = run.checkpointer._saver.in_flight
        while snapshot.state == "capturing":
            log.append(f"rows left: {snapshot.has_rows_left}")
            run.train(1)
    # What no row holds is looked up as of the same step.
    assert log[-3:] == ["rows left: False", "look", "capture_dense"]
    assert log.count("capture_dense") == 1
