"""Calls by handlers of signals, and while an exception ends training."""

import contextlib
import gc
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import cpr_ext
from cpr_ext.errors import SnapshotError, StorageError, UsageError
from cpr_ext.saving.saver import Saver
from cpr_ext.storage.commit_thread import CommitThread
from cpr_ext.storage.store import Store
from python_tests.saving.halves import Steps

ROOT = f"{Path(cpr_ext.__file__).parent}/"


class InterruptedCall:
    """Raises KeyboardInterrupt before the ``at``-th of the library's lines; counts them."""

    def __init__(self, at=0):
        self.at = at
        self.num_lines = 0

    def __call__(self, call, *arguments):
        gc.disable()  # what ends garbage of others is not interrupted
        sys.settrace(self._enter)
        try:
            return call(*arguments)
        finally:
            sys.settrace(None)
            gc.enable()

    def _enter(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(ROOT) else None

    def _line(self, frame, event, argument):
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def test_a_handler_may_save_wherever_the_library_calls_the_users_code(tmp_path):
    snapshots = []

    def save(*_):
        if len(snapshots) < 200:
            snapshots.append(run.checkpointer.save())

    run = Steps(tmp_path, schedule=cpr_ext.EverySteps(2), state={"mine": save})
    for optimizer in run.optimizers:
        optimizer.register_step_pre_hook(save)
        optimizer.register_step_post_hook(save)
    run.model.register_forward_hook(save)
    run.train(12)
    before_close = len(snapshots)
    run.checkpointer.close()
    assert before_close > 20
    assert run.checkpointer.metrics.failed_snapshots == 0
    assert {snapshot.state for snapshot in snapshots[:before_close]} <= {"committed", "failed"}
    assert all(record.is_complete for record in run.store.manifest.dense)


@pytest.mark.parametrize("overlap", ["never", "always"])
@pytest.mark.parametrize("first", [13, 63])
def test_a_signal_at_any_moment_leaves_exact_snapshots(tmp_path, overlap, first):
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
    # One that comes while the one before is checked is no point.
    newest = max(each.last_step for each in run.store.manifest.dense if each.is_complete)
    assert newest >= 28
    run.assert_recovers(states[newest], step=newest)


def test_calls_other_than_save_are_refused_within_another_call(tmp_path):
    refused = set()

    def value():
        for call in (run.checkpointer.step, run.checkpointer.wait, run.checkpointer.close):
            with pytest.raises(UsageError, match=r"from a signal's handler|in the middle of"):
                call()
            refused.add(call.__name__)

    run = Steps(tmp_path, state={"mine": value})
    run.train(1)
    run.checkpointer.wait()
    run.checkpointer.close()
    assert refused == {"step", "wait", "close"}


def refuse(*_, **__):
    raise StorageError(28, "no space left")


def test_the_users_exception_comes_through_where_warnings_are_errors(tmp_path):
    run = Steps(tmp_path)

    def loop():
        with run.checkpointer, pytest.MonkeyPatch.context() as patch:
            run.train(1)
            run.checkpointer.wait()
            patch.setattr(Store, "_commit", refuse)
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


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.SnapshotFailedWarning")
def test_close_does_not_raise_again_what_wait_raised(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_commit", refuse)
        run.checkpointer.save()
        with pytest.raises(SnapshotError):
            run.checkpointer.wait()
    run.checkpointer.close()


def test_wait_keeps_its_time(tmp_path, monkeypatch):
    staging = cpr_ext.StagingOptions(slot_bytes=64 << 10)
    run = Steps(tmp_path, tables={"a": (200_000, 8)}, staging=staging)
    run.train(1)
    advance = Saver.advance

    def slowly(self, **options):
        time.sleep(0.2)  # times a hundred slots
        advance(self, **options)

    monkeypatch.setattr(Saver, "advance", slowly)
    started = time.monotonic()
    assert run.checkpointer.wait(0.05) is False
    assert time.monotonic() - started < 10
    monkeypatch.undo()
    assert run.checkpointer.wait(60) is True


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


@pytest.mark.parametrize("number", [1, 2])
def test_ctrl_c_before_a_captured_snapshot_is_handed_over_costs_nothing(
    tmp_path, monkeypatch, number
):
    submit, calls = CommitThread.submit, []

    def interrupted(committer, change):
        if change.__name__ == "commit":  # of a snapshot, not of what was proven of one
            calls.append(change)
            if len(calls) == number:
                raise KeyboardInterrupt
        submit(committer, change)

    monkeypatch.setattr(CommitThread, "submit", interrupted)
    run = Steps(tmp_path, schedule=cpr_ext.EverySteps(2, when_busy="wait"))
    num_interrupts = 0
    for _ in range(8):
        try:
            run.train(1)
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 1
    assert run.checkpointer.wait(60)  # for ever, once
    run.checkpointer.close()
    assert run.checkpointer.metrics.failed_snapshots == 0
    assert run.checkpointer.step_count == 8
    assert [call.__self__.state for call in calls] == ["committed"] * len(calls)


@pytest.mark.parametrize("at", range(1, 9))
def test_ctrl_c_while_a_call_begins_or_ends_leaves_no_call_in_progress(run, at):
    guard = run.checkpointer._guard

    def call():
        with guard.in_call("step()"):
            pass

    with contextlib.suppress(KeyboardInterrupt):
        InterruptedCall(at)(call)
    assert not guard.is_busy


@pytest.mark.parametrize("overlap", ["never", "always"])
@pytest.mark.parametrize("part", range(4))
def test_ctrl_c_at_any_line_of_a_step_that_is_repeated_loses_nothing(tmp_path, overlap, part):
    def run_to_the_end(at, directory):
        run = Steps(directory, overlap=overlap, schedule=cpr_ext.EverySteps(2))
        run.train(2)
        call = InterruptedCall(at)
        run.backward()
        run.update()
        with contextlib.suppress(KeyboardInterrupt):
            call(run.checkpointer.step, 10)
        if run.checkpointer.step_count == 2:
            run.checkpointer.step(10)
        run.train(3)
        state = run.state()
        run.checkpointer.close(save=True)
        run.assert_recovers(state, step=6)
        return call.num_lines

    num_lines = run_to_the_end(0, tmp_path / "whole")
    for index in range(4):
        run_to_the_end(1 + (4 * part + index) * num_lines // 16, tmp_path / str(index))
