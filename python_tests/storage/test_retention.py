import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.saving.amount import CaptureAmount
from cpr_ext.storage.retention import Retention, plan_retention
from python_tests.helpers import assert_same
from python_tests.storage import records
from python_tests.wings.tools.maintenance.stores import recovered, trained_store


def record(kind, snapshot, is_complete=False, file_bytes=100):
    return records.record(snapshot, kind, is_complete=is_complete, file_bytes=file_bytes)


@st.composite
def histories(draw):
    """Manifests as a run leaves them without retention: (dense, rows)."""
    kinds = draw(st.lists(st.sampled_from(["base", "partial", "none"]), max_size=12))
    rows = [record("base", 1, file_bytes=1000)]
    dense = [record("dense", 1, draw(st.booleans()))]
    for snapshot, kind in enumerate(kinds, 2):
        if kind != "none":  # a partial snapshot may hold no row
            size = 1000 if kind == "base" else draw(st.integers(1, 500))
            rows.append(record(kind, snapshot, file_bytes=size))
        dense.append(record("dense", snapshot, draw(st.booleans()), 10))
    return dense, rows


def state_at(segments, snapshot):
    """The segments that a recovery of ``snapshot`` has to lay over one another."""
    records = [r for r in segments if r.snapshot <= snapshot]
    newest_base = max(i for i, r in enumerate(records) if r.kind == "base")
    return records[newest_base:]


@given(
    histories(), st.integers(0, 4), st.one_of(st.none(), st.integers(1, 6000)), st.integers(0, 14)
)
@settings(max_examples=500, deadline=None)
def test_what_is_kept_suffices_for_the_newest_snapshot_and_each_kept_point(
    history, points, max_bytes, step
):
    dense, rows = history
    retention = Retention(points, max_bytes)
    kept = plan_retention(dense, rows, retention)
    assert kept.dense[-1] == dense[-1]
    complete = [r for r in dense if r.is_complete]
    kept_complete = [r for r in kept.dense if r.is_complete]
    assert kept_complete == complete[len(complete) - len(kept_complete) :]
    if max_bytes is None:
        expected = complete[-points:] if points else [r for r in complete if r is dense[-1]]
        assert kept_complete == expected
    else:
        if kept.file_bytes > max_bytes:
            assert kept == plan_retention(dense, rows, Retention(0))
        for more in range(points + 1):  # as many as fit
            plan = plan_retention(dense, rows, Retention(more))
            assert len(kept.dense) >= len(plan.dense) or plan.file_bytes > max_bytes
    # Points from a step on stay whatever retention says, and nothing else that it would drop.
    wanted = [r for r in dense if r.is_complete and r.last_step >= step]
    since = plan_retention(dense, rows, retention, step)
    assert {*since.dense} == {*kept.dense, *wanted}
    for plan in (kept, since):
        for point in plan.dense:
            assert state_at(plan.rows, point.snapshot) == state_at(rows, point.snapshot)


def test_options_out_of_range_are_refused_and_thousands_of_points_warned_of():
    for options in ({"full_recovery_points": -1}, {"max_bytes": 0}):
        with pytest.raises(UsageError, match=next(iter(options))):
            Retention(**options)
    with pytest.warns(UserWarning, match="full_recovery_points=1000: .* 250 bytes"):
        Retention(1000)  # the manifest names each


def test_a_base_over_several_steps_does_not_take_the_last_full_recovery_point_away(
    tmp_path, monkeypatch
):
    trained = trained_store(tmp_path / "store", snapshots=0)  # its first base is complete
    point = trained.rows()
    monkeypatch.setattr(CaptureAmount, "fits", lambda *_, **__: False)
    monkeypatch.setattr(CaptureAmount, "can_fit", lambda _: False)
    trained.checkpointer._saver.begin("base")
    trained.checkpointer._saver.in_flight.capture_rows(1, max_bytes=1, wait_for_slot=True)
    trained.train(30)  # goes on capturing, a slot at each step
    trained.checkpointer.wait()
    assert [r.is_complete for r in trained.store.manifest.dense] == [True, False]
    trained.checkpointer.close()
    assert_same(point, recovered(tmp_path / "store", mode="full")[1])


@pytest.mark.parametrize("max_bytes", [None, 1, 10**9])
def test_what_retention_asks_for_costs_no_time(max_bytes):
    dense = [record("dense", snapshot, True, 10) for snapshot in range(1, 201)]
    rows = [record("base", snapshot) for snapshot in range(1, 201)]
    looked_at = []

    class Counted(list):
        def __iter__(self):
            looked_at.append(len(self))
            return super().__iter__()

    kept = plan_retention(dense, Counted(rows), Retention(500, max_bytes))
    assert len(kept.dense) == (1 if max_bytes == 1 else 200)
    assert sum(looked_at) < 200 * 20
