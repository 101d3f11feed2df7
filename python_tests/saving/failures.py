"""The whole life of a failed save, whatever the reason."""

import pytest

import cpr_ext
from cpr_ext.errors import SnapshotError, SnapshotFailedWarning
from python_tests.helpers import Trained, assert_same, copy_rows, row_records

NUM_SHARDS = 2
OPTIONS = {
    "num_shards": NUM_SHARDS,
    "schedule": cpr_ext.EverySteps(1000),
    "store": cpr_ext.StoreOptions(None),
}


def tracker_state(checkpointer):
    """Rows with their priority, of every tracker."""
    states = {}
    for table in checkpointer.tables:
        tracker = checkpointer._trackers[table.name]
        rows = tracker.dirty_rows(0, table.num_embeddings).tolist()
        counts = getattr(tracker, "counts", None)
        counts = counts() if callable(counts) else counts
        states[table.name] = (rows, None if counts is None else counts.tolist())
    return states


def assert_earlier_snapshots_load(run, expected):
    """The rows as of the last commit; read by another model beside the live one."""
    run.die()
    fresh = Trained(run.store.directory, seed=5, optimizer="sgd", **OPTIONS)
    report = fresh.checkpointer.recover()
    assert report.damaged_segments == []
    assert_same(fresh.rows(), expected)
    fresh.checkpointer.close()


def fail_and_go_on(run, break_it, mend_it, cause, match, *, changes=()):
    """The whole life of a failed save, whatever the reason.

    Args:
        changes: tables that breaking changes as a whole; all of their rows are dirty then.
    """
    run.checkpointer.save("partial")
    run.checkpointer.wait()
    run.train(2)
    before = tracker_state(run.checkpointer)
    for name in changes:
        num_rows = next(t for t in run.checkpointer.tables if t.name == name).num_embeddings
        rows, counts = before[name]
        counts = None if counts is None else [count + 1 for count in counts]
        before[name] = (list(range(num_rows)), counts)
    segments = [record for record, _ in row_records(run.store)]
    break_it()
    assert run.checkpointer.save("partial").number == 3
    with pytest.raises(SnapshotError, match="snapshot 3 failed") as failure:
        run.checkpointer.wait()
    assert isinstance(failure.value.__cause__, cause), failure.value.__cause__
    assert match in str(failure.value.__cause__)
    assert tracker_state(run.checkpointer) == before
    assert run.checkpointer.metrics.failed_snapshots == 1

    # Once more, and no one waits: the next step warns.
    run.checkpointer.schedule = cpr_ext.EverySteps(1)
    assert run.checkpointer.step().wait_until_done(30)
    run.checkpointer.schedule = cpr_ext.EverySteps(1000)
    with pytest.warns(SnapshotFailedWarning, match="training continues"):
        run.checkpointer.step()
    assert run.checkpointer.metrics.failed_snapshots == 2
    assert tracker_state(run.checkpointer) == before
    assert [record for record, _ in row_records(run.store)] == segments

    mend_it()
    run.train(1)
    run.checkpointer.save("partial")
    assert run.checkpointer.wait()
    after = tracker_state(run.checkpointer)["tables.big"][0]
    assert len(after) < len(before["tables.big"][0])
    rows = copy_rows(run.checkpointer.tables)
    run.checkpointer.save("base")
    assert run.checkpointer.wait()
    run.checkpointer.close()  # good snapshots were committed since
    assert_earlier_snapshots_load(run, rows)
