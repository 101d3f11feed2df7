"""Every source takes the same path, and what a recovery finds reaches its own report alone."""

import errno
import shutil

import pytest
import torch

import cpr_ext
from cpr_ext.errors import DamageError, StorageError, StoreError
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.recovery.sources import OwnStore
from cpr_ext.storage.store_reader import StoreReader
from python_tests.helpers import Trained, assert_same, flip

TABLES = {"a": (60, 3)}
OPTIONS = {
    "num_shards": 2,
    "consistency": "step",
    "when_busy": "wait",
    "optimizer": "sgd",
    "schedule": cpr_ext.EverySteps(1),
    "priority": cpr_ext.AllRows(),
    "retention": cpr_ext.Retention(full_recovery_points=3),
}


def trained(directory, num_steps=3):
    run = Trained(directory, TABLES, lookups=12, **OPTIONS)
    run.train(num_steps)
    run.checkpointer.wait()
    return run


def opened(directory, seed=9):
    return Trained(directory, TABLES, seed=seed, **OPTIONS)


class Recorded:
    """A source that notes what is asked of it, over another one."""

    def __init__(self, source):
        self.source, self.calls = source, []

    snapshot = property(lambda self: self.source.snapshot)
    is_of_job = property(lambda self: self.source.is_of_job)
    tables = property(lambda self: self.source.tables)

    def refuse_damage(self):
        self.calls.append("refuse_damage")
        self.source.refuse_damage()

    def newest(self, findings):
        self.calls.append("newest")
        return self.source.newest(findings)

    def copy_rows(self, findings):
        self.calls.append("copy_rows")
        self.source.copy_rows(findings)


def recorded(run, **options):
    recoverer = run.checkpointer._recovery._recoverer
    return recoverer, Recorded(OwnStore(run.store, recoverer._live, **options))


@pytest.mark.parametrize(
    ("on_damage", "calls"),
    [
        ("fall_back", ["newest", "copy_rows"]),
        ("raise", ["refuse_damage", "newest", "copy_rows"]),
    ],
)
def test_any_source_is_asked_in_one_order(tmp_path, on_damage, calls):
    run = trained(tmp_path)
    state = run.state()
    run.die()
    fresh = opened(tmp_path)
    recoverer, source = recorded(fresh)
    findings = recoverer._recover(source, strict=True, on_damage=on_damage)
    assert source.calls == calls
    assert (findings.step, findings.rows_restored, source.snapshot) == (3, 60, 3)
    assert_same(fresh.state(), state)
    fresh.checkpointer._release()


def test_of_an_empty_store_no_rows_are_copied(tmp_path):
    run = opened(tmp_path)
    recoverer, source = recorded(run)
    findings = recoverer._recover(source, strict=True, on_damage="fall_back")
    assert source.calls == ["newest"]
    assert vars(findings.report()) == vars(RecoveryReport(shards=(0, 1)))
    run.checkpointer._release()


def test_lost_shards_need_neither_the_dense_part_nor_other_shards_to_be_sound(tmp_path):
    run = trained(tmp_path)
    recoverer = run.checkpointer._recovery._recoverer
    for manifest in (run.store.dense, run.store.shards[1]):
        record = manifest.segments[-1]
        flip(manifest.path_of(record), record.header_bytes + 1)
    OwnStore(run.store, recoverer._live, [0]).refuse_damage()
    for lost in ([1], None):
        with pytest.raises(DamageError, match="shard-00001"):
            OwnStore(run.store, recoverer._live, lost).refuse_damage()
    run.checkpointer._release()


def test_rows_are_copied_before_the_store_is_rolled_back(tmp_path, monkeypatch):
    """Rows that cannot be read leave the store unchanged, with its newer segments."""
    trained(tmp_path).checkpointer.close()
    fresh = opened(tmp_path)
    before = [manifest.segments for manifest in (fresh.store.dense, *fresh.store.shards)]

    def refuse(self, findings):
        raise StorageError(errno.EIO, "the disk is gone", "a row")

    monkeypatch.setattr(OwnStore, "copy_rows", refuse)
    with pytest.raises(StorageError, match="the disk is gone"):
        fresh.checkpointer.recover(up_to_step=1)
    assert [manifest.segments for manifest in (fresh.store.dense, *fresh.store.shards)] == before
    monkeypatch.undo()
    assert fresh.checkpointer.recover().step == 3
    fresh.checkpointer._release()


def test_a_recovery_that_raised_leaves_nothing_in_the_next_report(tmp_path, monkeypatch):
    run = trained(tmp_path)
    run.die()
    fresh = opened(tmp_path)
    copy_rows, reports = OwnStore.copy_rows, []

    def count_and_fail(self, findings):
        copy_rows(self, findings)
        findings.add_missing("tables.a", torch.arange(5))
        raise StorageError(errno.EIO, "the disk is gone", "a row")

    monkeypatch.setattr(OwnStore, "copy_rows", count_and_fail)
    with pytest.raises(StorageError):
        reports.append(fresh.checkpointer.recover())
    assert reports == []
    monkeypatch.undo()
    report = fresh.checkpointer.recover()
    assert (report.rows_restored, report.rows_missing, report.missing_rows) == (60, 0, {})
    fresh.checkpointer._release()


def test_a_view_of_another_store_that_was_replaced_is_read_again_for_a_new_report(
    tmp_path, monkeypatch
):
    """Damage of the view that is gone is not reported."""
    trained(tmp_path / "old").checkpointer.close()
    old = StoreReader(tmp_path / "old").dense
    path = old.path_of(old.segments[-1])
    shutil.copy(path, tmp_path / "sound")
    flip(path, old.segments[-1].header_bytes + 1)
    answers = [True, False]

    def replaced(self):
        if is_gone := answers.pop(0):
            shutil.copy(tmp_path / "sound", path)
        return is_gone

    monkeypatch.setattr(StoreReader, "is_gone", replaced)
    fresh = opened(tmp_path / "new")
    report = fresh.checkpointer.recover(from_store=tmp_path / "old")
    assert (report.step, report.damaged_segments, report.segments_read) == (3, [], 6)
    assert answers == [False]
    fresh.checkpointer._release()


@pytest.mark.parametrize("many", [False, True], ids=["one store", "a list of stores"])
def test_a_damaged_full_recovery_point_falls_back_to_the_one_before(tmp_path, many):
    run = Trained(tmp_path / "old", TABLES, lookups=12, **OPTIONS)
    states = {}
    for step in (1, 2, 3):
        run.train(1)
        states[step] = run.state()
    run.checkpointer.close()
    dense = StoreReader(tmp_path / "old").dense
    assert [(r.last_step, r.is_complete) for r in dense.segments] == [(s, True) for s in states]
    newest = dense.path_of(dense.segments[-1])
    flip(newest, dense.segments[-1].header_bytes + 1)
    fresh = opened(tmp_path / "new")
    store = tmp_path / "old"
    report = fresh.checkpointer.recover(from_store=[store] if many else store, mode="full")
    assert report.step == 2
    assert [damaged.path for damaged in report.damaged_segments] == [newest]
    assert_same(fresh.state(), states[2])
    fresh.checkpointer._release()


@pytest.mark.parametrize("many", [False, True], ids=["one store", "a list of stores"])
def test_a_table_that_has_grown_keeps_its_old_rows(tmp_path, many):
    run = trained(tmp_path / "old")
    rows = run.rows()["tables.a"]["weight"]
    run.checkpointer.close()
    source = [tmp_path / "old"] if many else tmp_path / "old"
    grown = Trained(tmp_path / "new", {"a": (70, 3)}, seed=4, **OPTIONS)
    before = grown.rows()["tables.a"]["weight"]
    with pytest.raises(StoreError, match=r"'tables\.a' has num_embeddings 60, the model 70"):
        grown.checkpointer.recover(from_store=source)
    grown.checkpointer.recover(from_store=source, strict=False)
    after = grown.rows()["tables.a"]["weight"]
    assert_same([after[:60], after[60:]], [rows, before[60:]])
    grown.checkpointer._release()
