import gc
import threading
import time
import weakref

import pytest

import cpr_ext
from cpr_ext.errors import DamageError, SnapshotFailedWarning
from cpr_ext.storage import compactor, merge
from cpr_ext.storage.retention import Retention
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.tools.maintenance import verify
from python_tests.helpers import assert_same, flip
from python_tests.tools.maintenance.stores import recovered, trained_store

OPTIONS = {
    "compaction": cpr_ext.CompactionOptions(after=0.3),
    "retention": Retention(full_recovery_points=0),
}


def settle(trained):
    assert trained.checkpointer._saver.outcomes._compactor.wait(60)
    trained.checkpointer._saver.settle()


def saved(trained, count):
    """``count`` partial snapshots, each compacted if that is due."""
    for _ in range(count):
        trained.train(3)
        trained.checkpointer.save()
        trained.checkpointer.wait()
        settle(trained)


def test_training_with_compaction_stores_the_same_rows_in_fewer_segments(tmp_path):
    plain = trained_store(tmp_path / "plain", snapshots=12)
    compacted = trained_store(tmp_path / "compacted", snapshots=0, **OPTIONS)
    saved(compacted, 12)
    assert compacted.checkpointer.metrics.compactions > 3
    assert_same(plain.rows(), compacted.rows())
    segments = [len(t.store.shards[0].segments) for t in (plain, compacted)]
    plain.checkpointer.close()
    compacted.checkpointer.close()
    assert segments[0] == 13
    assert segments[1] <= 6
    assert verify(tmp_path / "compacted").is_sound
    assert_same(recovered(tmp_path / "plain")[1], recovered(tmp_path / "compacted")[1])


def test_a_full_recovery_point_stays_while_what_came_after_it_is_merged(tmp_path):
    trained = trained_store(
        tmp_path / "store", snapshots=0, compaction=cpr_ext.CompactionOptions(after=0.3)
    )
    point = trained.rows()
    saved(trained, 12)
    trained.checkpointer.close()
    kinds = [r.kind for r in StoreReader(tmp_path / "store").shards[0].segments]
    assert kinds[:2] == ["base", "merged"]
    assert kinds.count("partial") <= 5
    newest = recovered(tmp_path / "store")
    report, rows, _ = recovered(tmp_path / "store", mode="full")
    assert newest[0].step > report.step == 1
    assert_same(rows, point)


@pytest.fixture
def held_up(monkeypatch):
    """Merges wait at their end until the event is set: (at the end, go on)."""
    reached, go_on = threading.Event(), threading.Event()
    finish = merge.SegmentStream.finish

    def waits(self, *committed, **given):
        reached.set()
        while not go_on.wait(0.01):
            self._pace.spend(0)
        return finish(self, *committed, **given)

    monkeypatch.setattr(merge.SegmentStream, "finish", waits)
    yield reached, go_on
    go_on.set()


def test_a_base_committed_meanwhile_wins_and_the_merge_is_dropped(tmp_path, held_up):
    reached, go_on = held_up
    trained = trained_store(tmp_path / "store", snapshots=4, **OPTIONS)
    assert reached.wait(30)
    trained.checkpointer.save("base")
    trained.checkpointer.wait()  # snapshots do not wait for compaction
    go_on.set()
    settle(trained)
    expected = trained.rows()
    assert trained.checkpointer.metrics.failed_compactions == 0
    trained.checkpointer.close()
    assert verify(tmp_path / "store").left_overs == []
    assert [r.kind for r in StoreReader(tmp_path / "store").shards[0].segments] == ["base"]
    assert_same(recovered(tmp_path / "store")[1], expected)


def test_a_merge_that_is_dropped_leaves_no_store_open(tmp_path, held_up, monkeypatch):
    """Its error has frames that have the error: they would keep the store until a collection."""
    reached, go_on = held_up

    def gone(*given):
        reached.set()
        assert go_on.wait(30)
        error = DamageError("its file is gone")
        raise error

    monkeypatch.setattr(compactor, "write_merged", gone)
    trained = trained_store(tmp_path / "store", snapshots=4, **OPTIONS)
    assert reached.wait(30)
    trained.checkpointer.save("base")
    trained.checkpointer.wait()
    gc.collect()
    gc.disable()
    try:
        go_on.set()
        settle(trained)
        merges = weakref.ref(trained.checkpointer._saver.outcomes._compactor._merges)
        trained.checkpointer.close()
        del trained.checkpointer
        deadline = time.monotonic() + 10
        while merges() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert merges() is None
    finally:
        gc.enable()


def test_snapshots_committed_during_a_merge_are_kept(tmp_path, held_up):
    reached, go_on = held_up
    trained = trained_store(tmp_path / "store", snapshots=4, **OPTIONS)
    assert reached.wait(30)
    trained.train(3)
    trained.checkpointer.save()
    trained.checkpointer.wait()
    go_on.set()
    settle(trained)
    assert trained.checkpointer.metrics.compactions > 0
    newest = trained.store.shards[0].segments[-1].snapshot
    trained.checkpointer.close()
    plain = trained_store(tmp_path / "plain", snapshots=5)
    plain.checkpointer.close()
    assert newest == 6
    assert_same(recovered(tmp_path / "plain")[1], recovered(tmp_path / "store")[1])


@pytest.mark.parametrize("end", ["recover", "close"])
def test_recovering_or_closing_stops_a_merge_and_leaves_nothing_of_it(tmp_path, held_up, end):
    reached, _ = held_up
    trained = trained_store(tmp_path / "store", snapshots=4, **OPTIONS)
    assert reached.wait(30)
    if end == "recover":
        trained.checkpointer.recover()
        assert trained.checkpointer._saver.outcomes._compactor.wait(0)
    trained.checkpointer.close()
    report = verify(tmp_path / "store")
    assert report.is_sound
    assert report.left_overs == []


def test_a_damaged_segment_is_reported_and_training_goes_on(tmp_path):
    trained = trained_store(
        tmp_path / "store",
        snapshots=1,
        **{**OPTIONS, "compaction": cpr_ext.CompactionOptions(after=1e-9)},
    )
    settle(trained)
    base = trained.store.shards[0].segments[0]
    flip(trained.store.shards[0].path_of(base), base.header_bytes + 9)
    trained.train(3)
    trained.checkpointer.save()
    trained.checkpointer._saver.in_flight.wait_until_done()
    trained.checkpointer._saver.settle()
    assert trained.checkpointer._saver.outcomes._compactor.wait(60)
    with pytest.warns(SnapshotFailedWarning, match=base.file):
        trained.checkpointer._saver.settle()
    assert trained.checkpointer.metrics.failed_compactions == 1
    trained.train(1)
    assert base in trained.store.shards[0].segments
    trained.checkpointer.close()


def test_the_bandwidth_limit_holds_in_the_background(tmp_path):
    trained = trained_store(
        tmp_path / "store",
        snapshots=4,
        **{**OPTIONS, "compaction": cpr_ext.CompactionOptions(0.3, bytes_per_second=200_000)},
    )
    started = time.monotonic()
    assert trained.checkpointer._saver.outcomes._compactor.wait(60)
    trained.checkpointer.close()
    assert time.monotonic() - started > 0.1
