"""Two writers of one store: one wins, whatever the order of their calls."""

import errno
import fcntl
import os
import random
import re
import shutil
import threading
from itertools import product

import pytest
import torch

from cpr_ext.errors import CprError, DamageError, StorageError, StoreError
from cpr_ext.state.table import Table
from cpr_ext.storage import locks
from cpr_ext.storage.locks import DirectoryLock
from cpr_ext.storage.store import Store
from python_tests.storage.records import record

CALLS = [
    *((os, name) for name in ("open", "mkdir", "fsync", "replace", "unlink", "listdir", "close")),
    *((os, name) for name in ("stat", "lstat", "fstat", "pread", "pwrite", "ftruncate")),
    (fcntl, "flock"),
]
MODELS = {"first": (10, 2), "second": (7, 3)}


class Writer:
    """Opens a store on a thread that stops before each call of the system."""

    def __init__(self, name, directory):
        self.name = name
        self.num_calls = 0
        self.store = None
        self.error = None
        self._is_free = False
        self._stopped = threading.Semaphore(0)  # before a call, or at the end
        self._may_go = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._open, args=(directory,))
        self._thread.start()
        self._stopped.acquire()

    def tables(self):
        return [Table(self.name, torch.zeros(MODELS[self.name]))]

    def _open(self, directory):
        current.writer = self
        try:
            self.store = Store(directory, tables=self.tables())
        except CprError as error:
            self.error = error
        finally:
            self._is_free = True
            self._stopped.release()

    def before_call(self):
        if not self._is_free:
            self._stopped.release()
            self._may_go.acquire()
            self.num_calls += 1

    def go(self, num_calls):
        for _ in range(num_calls):
            if self._is_free:
                return
            self._may_go.release()
            self._stopped.acquire()

    def finish(self):
        self.go(10_000)
        self._thread.join()


current = threading.local()


@pytest.fixture
def _in_steps(monkeypatch):
    """Calls of a Writer's thread wait until they are asked for; nothing needs to be durable."""
    monkeypatch.setattr(locks, "_PAUSE_SECONDS", 0)
    monkeypatch.setattr(locks, "_OWN_SECONDS", 0)
    monkeypatch.setattr(locks.gc, "collect", lambda: 0)
    for module, name in CALLS:
        real = (lambda descriptor: None) if name == "fsync" else getattr(module, name)

        def call(*arguments, _real=real, **options):
            if (writer := getattr(current, "writer", None)) is not None:
                writer.before_call()
            return _real(*arguments, **options)

        monkeypatch.setattr(module, name, call)


def race(directory, first_calls, second_calls):
    """The first makes so many calls, then the second so many, then both come to their end.

    Returns the number of calls that each has made.
    """
    first = Writer("first", directory)
    first.go(first_calls)
    second = Writer("second", directory)
    second.go(second_calls)
    first.finish()
    second.finish()
    at = f"after {first_calls} and {second_calls} calls"
    [winner] = [writer for writer in (first, second) if writer.store is not None] or [None]
    assert winner is not None, f"{at} both lost: {first.error}; {second.error}"
    loser = second if winner is first else first
    assert type(loser.error) is StoreError, at
    told = r"is being written by (this same process \d|another process)"
    assert re.search(told, str(loser.error)), at
    winner.store.add(record(1, "dense"), record(1))  # acknowledged
    winner.store.close()
    again = Store(directory, tables=winner.tables())
    assert again.last_snapshot == 1, at
    again.close()
    return first.num_calls, second.num_calls


@pytest.mark.usefixtures("_in_steps")
def test_one_of_two_writers_wins_whichever_call_the_other_interrupts(tmp_path):
    num_calls, _ = race(tmp_path / "alone", 10_000, 10_000)
    assert num_calls > 30
    for calls in range(num_calls + 1):
        race(tmp_path / f"{calls}", calls, 10_000)
    draws = random.Random(16)
    for draw in range(100):
        race(tmp_path / f"draw-{draw}", draws.randrange(num_calls), draws.randrange(num_calls))


@pytest.mark.long
@pytest.mark.usefixtures("_in_steps")
def test_one_of_two_writers_wins_at_every_two_interruptions(tmp_path):
    num_calls, _ = race(tmp_path / "alone", 10_000, 10_000)
    for first, second in product(range(num_calls + 1), repeat=2):
        race(tmp_path / f"{first}-{second}", first, second)


# --- what a lock is ---


def new(directory):
    return Store(directory, tables=[Table("a", torch.zeros(3, 2))])


def test_a_lock_whose_holder_cannot_be_seen_names_no_living_process(tmp_path):
    with (tmp_path / "LOCK").open("w") as file:
        file.write("99999999\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="or one that it has started: no process here has"):
            DirectoryLock(tmp_path)
        for text in ("", "\x1b[31m"):
            file.truncate(0)
            file.seek(0)
            file.write(text)
            file.flush()
            with pytest.raises(StoreError, match="another process, which has not said yet"):
                DirectoryLock(tmp_path)


def test_a_lock_that_is_a_link_changes_no_other_file(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("years of work")
    store = tmp_path / "store"
    new(store).close()
    lock = store / "LOCK"
    lock.unlink()
    lock.symlink_to(outside)
    with pytest.raises(DamageError, match="LOCK"):
        new(store)
    lock.unlink()
    lock.hardlink_to(outside)
    new(store).close()
    assert outside.read_text() == "years of work"
    assert not lock.samefile(outside)


def test_a_hard_linked_copy_and_its_original_are_opened_side_by_side(tmp_path):
    store, copy = tmp_path / "store", tmp_path / "copy"
    new(store).close()
    shutil.copytree(store, copy, copy_function=os.link)
    first, second = new(store), new(copy)
    first.add(record(1, "dense"), record(1))
    assert second.is_empty
    second.close()
    first.close()
    assert new(copy).is_empty


def test_nothing_is_committed_to_a_directory_that_became_a_link(tmp_path):
    """It would be acknowledged, and refused at the next start."""
    store = new(tmp_path / "store")
    segments = tmp_path / "store" / "segments"
    segments.rename(tmp_path / "elsewhere")
    segments.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic link"):
        store.require_in_place()
    segments.unlink()
    (tmp_path / "elsewhere").rename(segments)
    store.require_in_place()
    (tmp_path / "store").rename(tmp_path / "moved")
    (tmp_path / "store").symlink_to(tmp_path / "moved")
    store.require_in_place()  # the store itself may be reached through links
    store.close()


def test_locks_are_given_back_though_closing_them_fails(tmp_path, monkeypatch):
    store = new(tmp_path)
    close = os.close

    def close_and_fail(descriptor):  # as Linux does it: the descriptor is free
        close(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "close", close_and_fail)
    with pytest.raises(StorageError, match=r"cannot close .*LOCK.*Input/output error") as refusal:
        store.close()
    assert refusal.value.errno == errno.EIO
    monkeypatch.undo()
    store.close()
    new(tmp_path).close()
