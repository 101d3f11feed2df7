"""What cannot be read is no damage; every call that reads: python_tests/faults/read_side.py."""

import errno
import os
from contextlib import contextmanager

import pytest

import cpr_ext
from cpr_ext.errors import StorageError
from cpr_ext.storage import retries
from python_tests.helpers import Trained, assert_same

OPTIONS = {
    "num_shards": 2,
    "schedule": cpr_ext.EverySteps(1000),
    "priority": cpr_ext.AllRows(),
    "store": cpr_ext.StoreOptions(None),
    "staging": cpr_ext.StagingOptions(direct_io=False),
}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retries, "pauses_seconds", (0.001, 0.001))


@pytest.fixture
def store(tmp_path):
    """Base of step 1, partial snapshots of steps 3 and 5, each a full-recovery point."""
    run = open_run(tmp_path / "store", store=cpr_ext.StoreOptions(None, cpr_ext.Retention(3)))
    run.train(1)
    run.checkpointer.wait()
    for _ in range(2):
        run.train(2)
        run.save()
    run.die()
    return tmp_path / "store"


def open_run(directory, seed=5, **options):
    return Trained(directory, optimizer="sgd", seed=seed, **{**OPTIONS, **options})


def contents(store):
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name != "LOCK"
    }


def newest(store, kind):
    return sorted(store.glob(f"**/*-{kind}.safetensors"), key=lambda path: path.name)[-1]


@contextmanager
def refused(monkeypatch, path):
    """Opening ``path`` fails."""
    open_it = os.open

    def refuse(name, *arguments, **options):
        if os.fspath(name) == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return open_it(name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        yield


def test_falling_back_keeps_what_could_not_be_read_until_a_newer_snapshot_is_durable(
    store, monkeypatch
):
    run, path = open_run(store), newest(store, "dense")
    before = contents(store)
    with refused(monkeypatch, path):
        report = run.checkpointer.recover(on_read_error="fall_back")
    assert report.step == 3
    assert [(d.path, d.is_unreadable) for d in report.damaged_segments] == [(path, True)]
    assert contents(store) == before
    run.die()  # before anything newer was saved: all is still there
    again = open_run(store, store=cpr_ext.StoreOptions(None, cpr_ext.Retention(3)))
    assert again.checkpointer.recover().step == 5
    with refused(monkeypatch, path):
        assert again.checkpointer.recover(on_read_error="fall_back").step == 3
    again.train(3)
    again.save()
    assert not path.exists()
    expected = again.rows()
    again.die()
    third = open_run(store, seed=8)
    assert third.checkpointer.recover().step == 6
    assert_same(third.rows(), expected)
    assert [r.last_step for r in third.store.manifest.dense if r.is_complete] == [1, 3, 6]
    third.checkpointer._release()


def test_a_full_disk_does_not_remove_what_could_not_be_read(store, monkeypatch):
    run, path = open_run(store), newest(store, "dense")
    with refused(monkeypatch, path):
        run.checkpointer.recover(on_read_error="fall_back")
        with pytest.raises(StorageError):  # again, as only that recovery was to fall back
            run.checkpointer.recover()
    run.store.release_history()
    assert path.exists()
    assert run.checkpointer.recover().step == 5
    run.checkpointer._release()
