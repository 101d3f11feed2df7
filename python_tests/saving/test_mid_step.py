"""Calls in the middle of a step, by handlers of signals, and while an exception ends training."""

import signal
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import cpr_ext
import cpr_ext.tracking.unwatched
from cpr_ext.errors import (
    SnapshotError,
    SnapshotFailedWarning,
    StorageError,
    UntrackedChangeWarning,
    UsageError,
)
from cpr_ext.storage.manifest import Manifest
from python_tests.helpers import Trained, assert_same, make_indices

NEVER = cpr_ext.EverySteps(10**6)


class Steps(Trained):
    """Trains in halves: what a step does before, and after, its optimizers."""

    def __init__(self, directory, **options):
        options = {"optimizer": "sgd", "schedule": NEVER, "priority": cpr_ext.AllRows(), **options}
        super().__init__(directory, **options)

    def backward(self):
        generator = torch.Generator().manual_seed(self.checkpointer.step_count)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        indices = make_indices(self.model, generator, self.lookups)
        self.model(indices, torch.randn(3, 4, generator=generator)).backward()

    def update(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def newest(self):
        return self.store.dense.segments[-1]

    def assert_recovers(self, expected, step):
        """A new process goes back to exactly this state, which is of that step."""
        if not self.checkpointer._closed:
            self.die()
        fresh = Steps(self.store.directory, tables=self.tables, seed=5)
        assert fresh.checkpointer.recover(mode="full").step == step
        assert_same(fresh.state(), expected)
        fresh.checkpointer.close()


@pytest.fixture
def run(tmp_path):
    run = Steps(tmp_path / "store")
    run.train(1)
    run.checkpointer.wait()
    run.train(2)
    yield run
    if not run.checkpointer._closed:
        run.checkpointer._release()


LARGE = {"a": (20_000, 8)}


@pytest.fixture
def slow_run(tmp_path):
    """A base is captured over several steps; the first of them is done."""
    run = Steps(tmp_path / "store", tables=LARGE, overlap="never", slot_bytes=64 << 10)
    run.train(1)
    assert run.checkpointer._saver.in_flight.state == "capturing"
    yield run
    if not run.checkpointer._closed:
        run.checkpointer._release()


# --- save() ---


def test_save_between_backward_and_the_optimizers_step_is_exact_and_complete(run):
    run.backward()
    expected = run.state()
    run.checkpointer.save()
    run.update()
    run.checkpointer.step()
    run.checkpointer.wait()
    assert run.newest().is_complete
    run.assert_recovers(expected, step=3)


def test_save_after_the_optimizers_step_is_taken_by_step(run):
    run.backward()
    run.update()
    snapshot = run.checkpointer.save()
    assert (snapshot.state, snapshot.is_done, snapshot.error) == ("requested", False, None)
    with pytest.raises(UsageError, match="step\\(\\) takes the snapshot"):
        snapshot.wait_until_done()
    with pytest.raises(AttributeError, match="not taken this snapshot yet"):
        _ = snapshot.last_step
    expected = run.state()
    assert run.checkpointer.step() is snapshot.snapshot
    assert snapshot.last_step == 4
    assert snapshot.wait_until_done(30)
    assert snapshot.state == "committed"
    assert run.newest().is_complete
    run.assert_recovers(expected, step=4)


@pytest.mark.parametrize("kinds", [("partial", "base"), ("base", "partial")])
def test_of_several_requests_one_snapshot_is_taken_and_a_base_wins(run, kinds):
    run.backward()
    run.update()
    first, second = (run.checkpointer.save(kind) for kind in kinds)
    assert first is second
    assert run.checkpointer.step().kind == "base"
    assert run.checkpointer.step() is None


def test_save_after_only_one_of_the_optimizers_has_stepped_is_taken_by_step(run):
    run.backward()
    run.optimizers[1].step()
    assert run.checkpointer.save().state == "requested"
    run.optimizers[0].step()
    assert run.checkpointer.step().kind == "partial"


# --- wait() and close() ---


def test_wait_in_the_middle_of_a_step_is_refused_where_rows_remain(slow_run):
    slow_run.backward()
    slow_run.update()
    for timeout in (None, 0.01):
        with pytest.raises(UsageError, match=r"wait\(\) in the middle of step 2"):
            slow_run.checkpointer.wait(timeout)
    slow_run.checkpointer.step()
    assert slow_run.checkpointer.wait() is True


def test_wait_in_the_middle_of_a_step_is_refused_where_a_snapshot_was_asked_for(run):
    run.backward()
    run.update()
    run.checkpointer.save()
    with pytest.raises(UsageError, match=r"wait\(\) in the middle of step 4"):
        run.checkpointer.wait()


def test_wait_in_the_middle_of_a_step_waits_for_what_is_captured(run):
    run.checkpointer.save()
    run.backward()
    run.update()
    assert run.checkpointer.wait() is True
    assert run.newest().last_step == 3


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.SnapshotFailedWarning")
def test_close_in_the_middle_of_a_step_gives_a_snapshot_up_that_needs_the_next_step(slow_run):
    slow_run.backward()
    slow_run.update()
    with pytest.raises(SnapshotError, match=r"close\(\) in the middle of step 2"):
        slow_run.checkpointer.close()
    assert slow_run.store.is_empty


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.SnapshotFailedWarning")
def test_the_end_of_a_with_block_in_the_middle_of_a_step_never_claims_that_step(tmp_path):
    run = Steps(tmp_path, tables=LARGE, overlap="never", slot_bytes=64 << 10)

    def loop():
        with run.checkpointer:
            run.train(1)
            run.backward()
            run.update()  # and break

    with pytest.raises(SnapshotError, match="middle of step 2"):
        loop()
    assert run.store.is_empty


def test_close_gives_a_request_up_that_no_step_took(run):
    run.backward()
    run.update()
    snapshot = run.checkpointer.save("base")
    with pytest.raises(SnapshotError, match=r"asked for was not taken: close\(\) in the middle"):
        run.checkpointer.close()
    assert (snapshot.state, snapshot.is_done) == ("failed", True)
    assert snapshot.wait_until_done()
    assert "step 4" in str(snapshot.error)


def test_close_between_backward_and_the_optimizers_step_finishes_the_snapshot(slow_run):
    slow_run.backward()
    expected = slow_run.state()
    slow_run.checkpointer.close()
    assert slow_run.newest().is_complete
    slow_run.assert_recovers(expected, step=1)


# --- save() by a signal's handler ---


def test_a_handler_may_save_wherever_the_library_calls_the_users_code(tmp_path):
    class Writer:
        def add_scalar(self, *_):
            save()

    snapshots = []

    def save(*_):
        if len(snapshots) < 200:
            snapshots.append(run.checkpointer.save())

    def extra_state():
        save()
        return {"epoch": 3}

    run = Steps(
        tmp_path, schedule=cpr_ext.EverySteps(2), scalar_writer=Writer(), extra_state=extra_state
    )
    for optimizer in run.optimizers:
        optimizer.register_step_pre_hook(save)
        optimizer.register_step_post_hook(save)
    run.model.register_forward_hook(save)
    run.train(12)
    run.checkpointer.close()
    assert len(snapshots) > 20
    assert run.checkpointer.metrics.failed_snapshots == 0
    assert {snapshot.state for snapshot in snapshots} <= {"committed", "failed"}
    assert all(record.is_complete for record in run.store.dense.segments)


@pytest.mark.parametrize("overlap", ["never", "always"])
@pytest.mark.parametrize("first", [13, 63])
def test_a_signal_at_any_moment_leaves_a_complete_and_exact_snapshot(tmp_path, overlap, first):
    """It is raised within every 97th Python call that step() makes."""
    run = Steps(tmp_path, overlap=overlap, schedule=cpr_ext.EverySteps(2))
    snapshots, states, num_calls = [], {}, 0
    step = run.checkpointer.step

    def raise_it(frame, event, _):
        nonlocal num_calls
        if event == "call" and "cpr_ext" in frame.f_code.co_filename:
            num_calls += 1
            if num_calls % 97 == first:
                signal.raise_signal(signal.SIGUSR1)

    def step_and_copy(num_samples):
        states[run.checkpointer.step_count + 1] = run.state()
        sys.setprofile(raise_it)
        try:
            return step(num_samples)
        finally:
            sys.setprofile(None)

    run.checkpointer.step = step_and_copy
    old = signal.signal(signal.SIGUSR1, lambda *_: snapshots.append(run.checkpointer.save()))
    try:
        run.train(30)
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert len(snapshots) > 5
    run.checkpointer.close()
    newest = run.newest()
    assert newest.is_complete
    run.assert_recovers(states[newest.last_step], step=newest.last_step)


def test_calls_other_than_save_are_refused_within_another_call(tmp_path):
    refused = []

    def extra_state():
        for call in (run.checkpointer.step, run.checkpointer.wait, run.checkpointer.close):
            with pytest.raises(UsageError, match=r"from a signal's handler|in the middle of"):
                call()
            refused.append(call)
        return None

    run = Steps(tmp_path, extra_state=extra_state)
    run.train(1)
    run.checkpointer.wait()
    run.checkpointer.close()
    assert len(refused) == 3


# --- exceptions ---


def test_the_users_exception_comes_through_where_warnings_are_errors(tmp_path):
    run = Steps(tmp_path)

    def loop():
        with run.checkpointer, pytest.MonkeyPatch.context() as patch:
            run.train(1)
            run.checkpointer.wait()
            patch.setattr(Manifest, "commit", refuse)
            run.checkpointer.save()
            run.checkpointer._saver.in_flight.wait_until_done()
            raise ZeroDivisionError

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError):
            loop()
    for optimizer in run.optimizers:
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
    with Steps(tmp_path).checkpointer as again:  # the lock is free
        assert again.recover().step == 1


def refuse(*_, **__):
    raise StorageError(28, "no space left")


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.SnapshotFailedWarning")
def test_close_does_not_raise_again_what_wait_raised(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "commit", refuse)
        run.checkpointer.save()
        with pytest.raises(SnapshotError):
            run.checkpointer.wait()
    run.checkpointer.close()


def test_close_is_silent_about_a_failure_before_later_good_snapshots(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "commit", refuse)
        run.checkpointer.save()
        run.checkpointer._saver.in_flight.wait_until_done()
        with pytest.warns(SnapshotFailedWarning):
            run.train(1)
    run.checkpointer.save()
    run.checkpointer.close()
    assert run.checkpointer.metrics.failed_snapshots == 1


def test_wait_keeps_its_time(tmp_path, monkeypatch):
    run = Steps(tmp_path, tables={"a": (200_000, 8)}, overlap="never", slot_bytes=64 << 10)
    run.train(1)
    advance = cpr_ext.saving.saver.Saver.advance

    def slowly(self, **options):
        time.sleep(0.2)  # times a hundred slots
        advance(self, **options)

    monkeypatch.setattr(cpr_ext.saving.saver.Saver, "advance", slowly)
    started = time.monotonic()
    assert run.checkpointer.wait(0.05) is False
    assert time.monotonic() - started < 10
    monkeypatch.undo()
    assert run.checkpointer.wait(60) is True
    run.checkpointer.close()


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.SnapshotFailedWarning")
@pytest.mark.filterwarnings("ignore::cpr_ext.errors.UntrackedChangeWarning")
def test_the_first_base_lost_to_a_write_in_the_window_is_taken_again_at_once(tmp_path):
    run = Steps(tmp_path, overlap="always")
    run.train(1)
    assert run.checkpointer._saver.in_flight.state == "capturing"
    with torch.no_grad():
        run.model.tables["big"].weight[5] = 1.0
    run.train(2)
    run.checkpointer.wait()
    assert run.newest().last_step <= 3
    run.checkpointer.close()


# --- mistakes ---


@pytest.mark.parametrize(
    "samples", [torch.tensor(8), np.int64(8), np.uint8(8), 8.0, 8, torch.tensor([8])]
)
def test_the_number_of_samples_is_any_whole_number(run, samples):
    before = run.checkpointer.num_samples
    run.checkpointer.step(samples)
    run.checkpointer.save()
    run.checkpointer.wait()
    assert run.newest().num_samples == before + 8


@pytest.mark.parametrize("samples", ["x", -1, 1.5, None, torch.tensor([1, 2])])
def test_another_number_of_samples_is_refused_and_the_step_not_counted(run, samples):
    with pytest.raises(UsageError, match="num_samples"):
        run.checkpointer.step(samples)
    assert run.checkpointer.step_count == 3


def small():
    model = nn.Sequential(nn.EmbeddingBag(50, 4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda m, o, d: cpr_ext.Checkpointer(m, d, d), "needed: the torch optimizer"),
        (lambda m, o, d: cpr_ext.Checkpointer(m, None, d), "NoneType; needed: the torch optimizer"),
        (
            lambda m, o, d: cpr_ext.Checkpointer(m, m.parameters(), d),
            "a Parameter; needed: the torch optimizer",
        ),
        (
            lambda m, o, d: cpr_ext.Checkpointer(m, small()[1], d),
            "a SGD updates no parameter of this model",
        ),
        (
            lambda m, o, d: cpr_ext.Checkpointer(m, [o, torch.optim.SGD(m.parameters())], d),
            "updated by two optimizers",
        ),
        (lambda m, o, d: cpr_ext.MostFrequentlyUsed(12.5), "fraction is 12.5"),
        (lambda m, o, d: cpr_ext.Checkpointer(m, o, d, schedule=500), "schedule is 500"),
        (lambda m, o, d: cpr_ext.Checkpointer(m, o, d, priority=cpr_ext.AllRows), "priority is"),
        (lambda m, o, d: cpr_ext.Checkpointer(m, o, d, num_shards=1.5), "num_shards is 1.5"),
        (lambda m, o, d: cpr_ext.Checkpointer(m, o, d, consistency="rows"), "allowed: row, step"),
        (lambda m, o, d: cpr_ext.Checkpointer(m, o, d, slot_bytes=1000), "at least"),
        (lambda m, o, d: cpr_ext.Checkpointer(m, o, d, tables={"a": "0.weight"}), "is a str"),
        (lambda m, o, d: cpr_ext.Checkpointer(m, o, d, tables=[m[0]]), "EmbeddingBag"),
        (lambda m, o, d: cpr_ext.Checkpointer(m, o, d, extra_state={}), "extra_state is a dict"),
    ],
)
def test_a_typical_mistake_is_named_with_its_remedy(tmp_path, mistake, message):
    with pytest.raises(UsageError, match=message):
        mistake(*small(), tmp_path / "store")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda c: c.recover(shards=1), "shards is 1; needed: a list"),
        (lambda c: c.recover(shards=[7]), "shard 7 does not exist"),
        (lambda c: c.save(kind="full"), "kind is 'full'; allowed: partial, base"),
        (lambda c: c.record_lookups("emb", torch.tensor([1])), "no table 'emb'; there are: 0"),
    ],
)
def test_a_typical_mistake_in_a_call_is_named_with_its_remedy(tmp_path, mistake, message):
    model, optimizer = small()
    with cpr_ext.Checkpointer(model, optimizer, tmp_path, num_shards=2.0) as checkpointer:
        with pytest.raises(UsageError, match=message):
            mistake(checkpointer)


def own_warnings(caught):
    return [str(each.message) for each in caught if each.category is UntrackedChangeWarning]


def test_a_large_parameter_that_is_no_table_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(cpr_ext.tracking.unwatched, "_LARGE_BYTES", 1000)
    model = nn.Sequential(nn.Embedding(500, 4), nn.Linear(4, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UntrackedChangeWarning, match=r"parameter '1\.weight' .* is no table"):
        cpr_ext.Checkpointer(model, optimizer, tmp_path).close()


def test_sparse_gradients_of_a_parameter_that_is_no_table_are_warned_of_once(tmp_path):
    model = nn.ModuleList([nn.Embedding(50, 4, sparse=True) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cpr_ext.Checkpointer(model, optimizer, tmp_path, tables={"a": model[0]}) as checkpointer:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                sum(table(torch.tensor([1])).sum() for table in model).backward()
                optimizer.step()
                checkpointer.step()
        (message,) = own_warnings(caught)
        assert "'1.weight' has sparse gradients but is no table" in message


@pytest.mark.parametrize("saves_it", [True, False])
def test_a_scheduler_whose_position_is_not_saved_is_warned_of_once(tmp_path, saves_it):
    model, optimizer = small()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    extra_state = (lambda: {"scheduler": scheduler.state_dict()}) if saves_it else None
    with (
        cpr_ext.Checkpointer(model, optimizer, tmp_path, extra_state=extra_state) as checkpointer,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        checkpointer.step()
        checkpointer.step()
    found = own_warnings(caught)
    assert len(found) == (not saves_it)
    assert saves_it or "a learning-rate scheduler drives SGD" in found[0]
