"""Every source takes the same path, and what a recovery finds reaches its own report alone."""

import pytest

import cpr_ext
from cpr_ext.errors import DamageError
from cpr_ext.recovery.sources import OwnStore
from cpr_ext.storage.store_reader import StoreReader
from python_tests.helpers import Trained, assert_same, flip

TABLES = {"a": (60, 3)}
OPTIONS = {
    "num_shards": 2,
    "optimizer": "sgd",
    "schedule": cpr_ext.EverySteps(1, when_busy="wait"),
    "priority": cpr_ext.AllRows(),
    "store": cpr_ext.StoreOptions(retention=cpr_ext.Retention(3)),
}


def opened(directory, seed=9):
    return Trained(directory, TABLES, seed=seed, lookups=12, **OPTIONS)


def test_lost_rows_need_neither_the_dense_part_nor_chunks_of_other_rows_to_be_sound(tmp_path):
    staging = cpr_ext.StagingOptions(slot_bytes=64 << 10)
    run = Trained(tmp_path, {"a": (20_000, 8)}, num_shards=2, staging=staging)
    run.train(1)
    run.checkpointer.wait()
    (record,) = run.store.manifest.rows
    flip(run.store.path_of(record), record.file_bytes // 3)  # of row 13,000 or so
    dense = run.store.manifest.dense[-1]
    flip(run.store.path_of(dense), dense.header_bytes + 1)
    recoverer = run.checkpointer._recovery._recoverer
    OwnStore(run.store, recoverer._live, [{"tables.a": (0, 10_000)}]).refuse_damage()
    first, second = {"tables.a": (0, 9)}, {"tables.a": (10_000, 20_000)}
    for lost in ([second], [first, second]):
        with pytest.raises(DamageError, match="-base"):
            OwnStore(run.store, recoverer._live, lost).refuse_damage()
    report = run.checkpointer.recover(shards=[0])
    assert (report.rows_restored, report.damaged_segments) == (10_000, [])
    assert report.bytes_read < 0.6 * record.file_bytes
    run.checkpointer._release()


@pytest.mark.parametrize("many", [False, True], ids=["one store", "a list of stores"])
def test_a_damaged_full_recovery_point_falls_back_to_the_one_before(tmp_path, many):
    run, states = opened(tmp_path / "old", seed=0), {}
    for step in (1, 2, 3):
        run.train(1)
        states[step] = run.state()
    run.checkpointer.close()
    old = StoreReader(tmp_path / "old")
    dense = old.manifest.dense
    assert [(r.last_step, r.is_complete) for r in dense] == [(s, True) for s in states]
    newest = old.path_of(dense[-1])
    flip(newest, dense[-1].header_bytes + 1)
    fresh = opened(tmp_path / "new")
    store = tmp_path / "old"
    report = fresh.checkpointer.recover(from_store=[store] if many else store, mode="full")
    assert report.step == 2
    assert [damaged.path for damaged in report.damaged_segments] == [newest]
    assert_same(fresh.state(), states[2])
    fresh.checkpointer._release()
