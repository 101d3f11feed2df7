"""Calls in the middle of a step, by handlers of signals, and while an exception ends training."""

import pytest

import cpr_ext
import cpr_ext.tracking.unwatched
from cpr_ext.errors import SnapshotError, UsageError
from python_tests.saving.halves import LARGE, Steps


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
    assert (snapshot.step, snapshot.number, snapshot.file_bytes) == (None, None, 0)
    expected = run.state()
    assert run.checkpointer.step() is snapshot
    assert snapshot.step == 4
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


def test_wait_takes_the_snapshot_of_a_step_that_a_recovery_has_undone(run):
    run.checkpointer.save()
    expected = run.state()
    run.backward()
    run.update()
    snapshot = run.checkpointer.save()
    run.checkpointer.recover(mode="full")
    assert snapshot.state == "requested"
    assert run.checkpointer.wait() is True
    assert (snapshot.state, snapshot.step) == ("committed", 3)
    assert run.newest().is_complete
    run.assert_recovers(expected, step=3)


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
    run = Steps(tmp_path, tables=LARGE, staging=cpr_ext.StagingOptions(slot_bytes=64 << 10))

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
