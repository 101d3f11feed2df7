import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext.errors import StoreError, UsageError
from cpr_ext.storage.file_names import segment_name
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.merge_plan import plan_merges, recovery_points
from cpr_ext.storage.retention import Retention, plan_retention
from cpr_ext.storage.store_reader import StoreReader
from python_tests.helpers import assert_same
from python_tests.tools.maintenance.stores import recovered, trained_store


def record(kind, snapshot, is_complete=False, file_bytes=100):
    name = segment_name(snapshot, kind)
    return SegmentRecord(
        name, kind, snapshot, snapshot, snapshot, snapshot, file_bytes, 8, 0, is_complete
    )


@st.composite
def histories(draw):
    """Manifests as a run leaves them without retention: (dense, one shard)."""
    kinds = draw(st.lists(st.sampled_from(["base", "partial", "none"]), max_size=12))
    shard = [record("base", 1, file_bytes=1000)]
    dense = [record("dense", 1, draw(st.booleans()))]
    for snapshot, kind in enumerate(kinds, 2):
        if kind != "none":  # a partial snapshot may hold no row of a shard
            size = 1000 if kind == "base" else draw(st.integers(1, 500))
            shard.append(record(kind, snapshot, file_bytes=size))
        dense.append(record("dense", snapshot, draw(st.booleans()), 10))
    return dense, shard


def state_at(segments, snapshot):
    """The segments that a recovery of ``snapshot`` has to lay over one another."""
    records = [r for r in segments if r.snapshot <= snapshot]
    newest_base = max(i for i, r in enumerate(records) if r.kind == "base")
    return records[newest_base:]


@given(histories(), st.integers(0, 4), st.one_of(st.none(), st.integers(1, 6000)))
@settings(max_examples=300, deadline=None)
def test_what_is_kept_suffices_for_the_newest_snapshot_and_each_kept_point(
    history, points, max_bytes
):
    dense, shard = history
    kept = plan_retention(dense, [shard], Retention(points, max_bytes))
    assert kept.dense[-1] == dense[-1]
    complete = [r for r in dense if r.is_complete]
    for point in kept.dense:
        assert state_at(kept.shards[0], point.snapshot) == state_at(shard, point.snapshot)
    kept_complete = [r for r in kept.dense if r.is_complete]
    assert kept_complete == complete[len(complete) - len(kept_complete) :]
    if max_bytes is None:
        expected = complete[-points:] if points else [r for r in complete if r is dense[-1]]
        assert kept_complete == expected
    elif kept.file_bytes > max_bytes:
        assert kept == plan_retention(dense, [shard], Retention(0))


@given(histories(), st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_merging_keeps_every_point_at_a_boundary_and_never_reaches_beyond_the_newest(
    history, points
):
    dense, shard = history
    uncommitted = record("partial", dense[-1].snapshot + 1)
    kept = plan_retention(dense, [shard], Retention(points))
    segments = (*kept.shards[0], uncommitted)
    reachable = recovery_points(kept.dense)
    for merge in plan_merges(segments, reachable):
        assert uncommitted not in merge.sources
        at = segments.index(merge.sources[0])
        assert segments[at : at + len(merge.sources)] == merge.sources
        for point in reachable:  # all or none of it belongs to the point
            inside = [r.snapshot <= point for r in merge.sources]
            assert all(inside) or not any(inside)
        assert merge.read == merge.sources[-len(merge.read) :]
        assert (merge.kind == "base") == (merge.read[0].kind == "base")
        assert segment_name(merge.snapshot, merge.kind) not in {r.file for r in segments}


def complete_run(directory, points, **retention):
    """Bases at one step, so each is a full-recovery point, with partial snapshots between them."""
    trained = trained_store(
        directory, snapshots=0, retention=Retention(points, **retention), consistency="step"
    )
    states = {1: trained.rows()}
    for _ in range(3):
        trained.train(2)
        trained.checkpointer.save()
        trained.checkpointer.wait()
        trained.train(2)
        trained.checkpointer.save("base")
        trained.checkpointer.wait()
        states[trained.checkpointer.step_count] = trained.rows()
    return trained, states


@pytest.mark.parametrize("points", [1, 2, 3])
def test_as_many_full_recovery_points_are_kept_as_asked_for(tmp_path, points):
    trained, states = complete_run(tmp_path / "store", points)
    trained.train(2)
    trained.checkpointer.save()
    trained.checkpointer.close()
    reader = StoreReader(tmp_path / "store")
    complete = [r.last_step for r in reader.dense.segments if r.is_complete]
    assert complete == sorted(states)[-points:]
    bases = [r for r in reader.shards[0].segments if r.kind == "base"]
    assert len(bases) == points
    report, rows, _ = recovered(tmp_path / "store", mode="full")
    assert_same(rows, states[report.step])


def test_without_full_recovery_points_only_the_newest_snapshot_is_kept(tmp_path):
    trained, _ = complete_run(tmp_path / "store", 0)
    trained.train(6)  # more rows than a partial snapshot takes
    trained.checkpointer.save()
    trained.checkpointer.close()
    reader = StoreReader(tmp_path / "store")
    assert [r.is_complete for r in reader.dense.segments] == [False]
    with pytest.raises(StoreError, match="no full-recovery point"):
        recovered(tmp_path / "store", mode="full")


def test_beyond_max_bytes_the_oldest_points_go_and_the_newest_snapshot_stays(tmp_path):
    unlimited, _ = complete_run(tmp_path / "a", 9)
    unlimited.checkpointer.close()
    size = sum(r.file_bytes for r in StoreReader(tmp_path / "a").shards[0].segments)
    limited, states = complete_run(tmp_path / "b", 9, max_bytes=size)  # three shards: a third
    limited.checkpointer.close()
    reader = StoreReader(tmp_path / "b")
    assert len(reader.dense.segments) < len(StoreReader(tmp_path / "a").dense.segments)
    tiny, states = complete_run(tmp_path / "c", 9, max_bytes=1)
    tiny.checkpointer.close()
    report, rows, _ = recovered(tmp_path / "c")
    assert_same(rows, states[report.step])


@pytest.mark.parametrize("options", [{"full_recovery_points": -1}, {"max_bytes": 0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        Retention(**options)


def test_a_base_over_several_steps_does_not_take_the_last_full_recovery_point_away(tmp_path):
    trained = trained_store(tmp_path / "store", snapshots=0)  # its first base is complete
    point = trained.rows()
    trained.checkpointer._saver.begin("base")
    trained.checkpointer._saver.in_flight.capture_rows(1, max_bytes=1, wait_for_slot=True)
    trained.train(30)  # goes on capturing, a slot at each step
    trained.checkpointer.wait()
    assert [r.is_complete for r in trained.store.dense.segments] == [True, False]
    trained.checkpointer.close()
    assert_same(point, recovered(tmp_path / "store", mode="full")[1])


@pytest.mark.parametrize("max_bytes", [None, 1, 10**9])
def test_what_retention_asks_for_costs_no_time(max_bytes):
    dense = [record("dense", snapshot, True, 10) for snapshot in range(1, 201)]
    shard = [record("base", snapshot) for snapshot in range(1, 201)]
    looked_at = []

    class Counted(list):
        def __iter__(self):
            looked_at.append(len(self))
            return super().__iter__()

    kept = plan_retention(dense, [Counted(shard)], Retention(10**9, max_bytes))
    assert len(kept.dense) == (1 if max_bytes == 1 else 200)
    assert sum(looked_at) < 200 * 20


def test_a_store_that_is_to_keep_all_points_trains_on(tmp_path):
    trained, states = complete_run(tmp_path / "store", 10**9, max_bytes=10**9)
    trained.checkpointer.close()
    points = [r for r in StoreReader(tmp_path / "store").dense.segments if r.is_complete]
    assert len(points) == len(states)


@given(histories(), st.integers(0, 4), st.integers(1, 6000))
@settings(max_examples=300, deadline=None)
def test_as_many_points_are_kept_as_fit(history, points, max_bytes):
    dense, shard = history
    kept = plan_retention(dense, [shard], Retention(points, max_bytes))
    for more in range(points + 1):
        plan = plan_retention(dense, [shard], Retention(more))
        if plan.file_bytes <= max_bytes:
            assert len(kept.dense) >= len(plan.dense)
