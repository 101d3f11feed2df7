"""Calls in the middle of a step, by handlers of signals, and while an exception ends training."""

import pytest

from cpr_ext.errors import SnapshotError, UsageError


def half(run):
    """A step without its end."""
    run.backward()
    run.update()


def test_save_after_the_optimizers_step_is_taken_by_step(run):
    half(run)
    snapshot = run.checkpointer.save()
    assert (snapshot.state, snapshot.is_done, snapshot.error) == ("requested", False, None)
    with pytest.raises(UsageError, match="step\\(\\) takes the snapshot"):
        snapshot.wait_until_done()
    with pytest.raises(UsageError, match=r"wait\(\) in the middle of step 4"):
        run.checkpointer.wait()
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
    run.optimizers[1].step()  # one of them is enough
    first, second = (run.checkpointer.save(kind) for kind in kinds)
    assert first is second
    run.optimizers[0].step()
    assert run.checkpointer.step().kind == "base"
    assert run.checkpointer.step() is None


def test_wait_in_the_middle_of_a_step_is_refused_where_rows_remain(slow_run):
    half(slow_run)
    for timeout in (None, 0.01):
        with pytest.raises(UsageError, match=r"wait\(\) in the middle of step 2"):
            slow_run.checkpointer.wait(timeout)
    slow_run.checkpointer.step()
    assert slow_run.checkpointer.wait() is True


def test_wait_takes_the_snapshot_of_a_step_that_a_recovery_has_undone(run):
    run.checkpointer.save()
    expected = run.state()
    half(run)
    assert run.checkpointer.wait() is True  # of what is captured
    assert run.newest().last_step == 3
    snapshot = run.checkpointer.save()
    run.checkpointer.recover(mode="full")
    assert snapshot.state == "requested"
    assert run.checkpointer.wait() is True
    assert (snapshot.state, snapshot.step) == ("committed", 3)
    assert run.newest().is_complete
    run.assert_recovers(expected, step=3)


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.SnapshotFailedWarning")
def test_the_end_of_a_with_block_in_the_middle_of_a_step_never_claims_that_step(slow_run):
    def loop():
        with slow_run.checkpointer:
            half(slow_run)  # and break

    with pytest.raises(SnapshotError, match=r"close\(\) in the middle of step 2"):
        loop()
    assert slow_run.store.is_empty


def test_close_gives_a_request_up_that_no_step_took(run):
    half(run)
    snapshot = run.checkpointer.save("base")
    with pytest.raises(SnapshotError, match=r"asked for was not taken: close\(\) in the middle"):
        run.checkpointer.close()
    assert (snapshot.state, snapshot.is_done) == ("failed", True)
    assert snapshot.wait_until_done()
    assert "step 4" in str(snapshot.error)
