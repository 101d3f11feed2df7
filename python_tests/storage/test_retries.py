"""What cannot be read is no damage; every call that reads: python_tests/faults/read_side.py."""

import errno
import os
import resource
from contextlib import contextmanager

import pytest

import cpr_ext
from cpr_ext._native import native
from cpr_ext.errors import DamageError, StorageError
from cpr_ext.storage import retries
from python_tests.helpers import Trained, assert_same, flip

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
def refused(monkeypatch, path, code, times=10**9):
    """Opening ``path`` fails so many times; the numbers of the tries are in the list."""
    open_it, tries = os.open, []

    def refuse(name, *arguments, **options):
        if os.fspath(name) == str(path) and len(tries) < times:
            tries.append(len(tries))
            raise OSError(code, os.strerror(code), str(path))
        return open_it(name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        yield tries


def test_falling_back_keeps_what_could_not_be_read_until_a_newer_snapshot_is_durable(
    store, monkeypatch
):
    run, path = open_run(store), newest(store, "dense")
    before = contents(store)
    with refused(monkeypatch, path, errno.EIO):
        report = run.checkpointer.recover(on_read_error="fall_back")
    assert report.step == 3
    assert [d.is_unreadable for d in report.damaged_segments] == [True]
    assert report.unreadable_paths == {path}
    assert contents(store) == before
    run.die()  # before anything newer was saved: all is still there
    again = open_run(store, store=cpr_ext.StoreOptions(None, cpr_ext.Retention(3)))
    assert again.checkpointer.recover().step == 5
    with refused(monkeypatch, path, errno.EIO):
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
    with refused(monkeypatch, path, errno.EIO):
        run.checkpointer.recover(on_read_error="fall_back")
    run.store.release_history()
    assert path.exists()
    assert run.checkpointer.recover().step == 5
    run.checkpointer._release()


def test_nothing_readable_is_no_damage_but_damage_is(store, monkeypatch):
    run, before = open_run(store), contents(store)
    restore = native.restore_segment

    def starved(*arguments, **options):
        """The process can open no file meanwhile."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.open("/", os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            return restore(*arguments, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    monkeypatch.setattr(native, "restore_segment", starved)
    with pytest.raises(StorageError, match="can be read"):
        run.checkpointer.recover(on_read_error="fall_back")
    monkeypatch.setattr(native, "restore_segment", restore)
    assert contents(store) == before
    flip(newest(store, "dense"), 5000)
    with pytest.raises(DamageError):
        run.checkpointer.recover(on_damage="raise", on_read_error="fall_back")
    run.checkpointer._release()


def test_a_store_whose_manifest_or_directory_cannot_be_looked_at_is_not_opened(store, monkeypatch):
    """Not even for the message that says so."""
    before, stat = contents(store), os.stat
    with refused(monkeypatch, store / "MANIFEST.json", errno.EIO), pytest.raises(StorageError):
        open_run(store)
    assert contents(store) == before

    def look(path, *arguments, **named):
        if str(path) == str(store):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", look)
    with pytest.raises(StorageError, match=r"cannot open the store.*Input/output error"):
        open_run(store)


@pytest.mark.parametrize("times", [1, 10**9])
def test_a_store_is_not_called_none_because_the_system_does_not_tell(store, monkeypatch, times):
    look, tries = os.lstat, []

    def refuse(path, *arguments, **options):
        if os.fspath(path) == str(store / "MANIFEST.json") and len(tries) < times:
            tries.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return look(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", refuse)
        if times == 1:
            open_run(store).die()
        else:
            with pytest.raises(StorageError, match=r"cannot read .*MANIFEST\.json"):
                open_run(store)
    assert tries
