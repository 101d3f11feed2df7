"""A sample of ``python -m python_tests.faults.readers``, and how leases and views behave."""

import threading

import pytest

from cpr_ext import StoreOptions
from cpr_ext.errors import DamageError
from cpr_ext.storage import locks
from cpr_ext.storage.retention import Retention
from cpr_ext.storage.store_reader import StoreReader, read_committed
from cpr_ext.wings.tools.maintenance import export, read_rows, verify
from python_tests.faults.readers import NUM_ROWS, campaign, open_run

ROUNDS = 8


@pytest.mark.parametrize("wait_seconds", [600.0, 0.0], ids=["leases", "none"])
def test_each_reader_beside_a_writer_returns_one_committed_state(wait_seconds):
    assert campaign(ROUNDS, wait_seconds) == {
        name: [] for name in ("export", "read_rows", "from_store", "inspect", "verify")
    }


@pytest.fixture
def run(tmp_path):
    """A base and a newer base whose commit has superseded it."""
    options = StoreOptions(retention=Retention(0))
    model, _, checkpointer = open_run(tmp_path / "store", store=options)
    checkpointer.save("base")
    checkpointer.wait()
    yield model, checkpointer
    checkpointer.close()


def save_base(checkpointer):
    checkpointer.save("base")
    checkpointer.wait()


def files(checkpointer):
    store = checkpointer.store.directory
    return {str(path.relative_to(store)) for path in store.rglob("*.safetensors")}


def test_superseded_files_wait_for_readers_and_go_with_the_next_commit(run):
    _, checkpointer = run
    before = files(checkpointer)
    with locks.reader_lease(checkpointer.store.directory):
        save_base(checkpointer)
        assert before < files(checkpointer)
    save_base(checkpointer)
    assert not before & files(checkpointer)
    assert len(files(checkpointer)) == 2


def test_what_still_waits_goes_when_the_store_is_closed(run):
    _, checkpointer = run
    before = files(checkpointer)
    with locks.reader_lease(checkpointer.store.directory):
        save_base(checkpointer)
    checkpointer.close()
    assert not before & files(checkpointer)


def test_readers_are_waited_for_no_longer_than_agreed(run, monkeypatch):
    _, checkpointer = run
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.0)
    before = files(checkpointer)
    with locks.reader_lease(checkpointer.store.directory):
        save_base(checkpointer)
        assert not before & files(checkpointer)


def test_a_full_disk_waits_for_no_reader(run):
    _, checkpointer = run
    before = files(checkpointer)
    with locks.reader_lease(checkpointer.store.directory):
        save_base(checkpointer)
        checkpointer.store.release_history()
        assert not before & files(checkpointer)


def test_a_reader_whose_files_vanish_begins_again(run, monkeypatch):
    _, checkpointer = run
    monkeypatch.setattr(locks, "has_readers", lambda store: False)  # of another machine
    views = []

    def read(reader):
        views.append(reader.newest().snapshot)
        if len(views) < 3:
            save_base(checkpointer)
        return read_rows(reader, "table", range(NUM_ROWS)).steps

    read_committed(checkpointer.store.directory, read)
    assert len(views) == 3
    assert views[0] < views[1] < views[2]


def test_damage_is_not_mistaken_for_a_change(run):
    _, checkpointer = run
    store = checkpointer.store.directory
    next(store.glob("segments/*-base*")).unlink()
    tries = []

    def read(reader):
        tries.append(1)
        return read_rows(reader, "table", range(NUM_ROWS))

    with pytest.raises(DamageError):
        read_committed(store, read)
    assert len(tries) == 1
    assert not verify(store).is_sound


def test_a_store_that_cannot_be_locked_is_read_all_the_same(run, tmp_path, monkeypatch):
    _, checkpointer = run

    def refuse(descriptor, operation):
        raise OSError(37, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(locks.fcntl, "flock", refuse)
        assert not locks.has_readers(checkpointer.store.directory)
        assert export(checkpointer.store.directory, tmp_path / "out").tensors == 2


def test_a_reader_writes_nothing(run, tmp_path):
    _, checkpointer = run
    store = checkpointer.store.directory
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    export(store, tmp_path / "out")
    verify(store)
    StoreReader(store)
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before


def test_readers_do_not_exclude_each_other(run):
    _, checkpointer = run
    store = checkpointer.store.directory
    inside = threading.Barrier(2, timeout=60)

    def read():
        with locks.reader_lease(store):
            inside.wait()

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not inside.broken
