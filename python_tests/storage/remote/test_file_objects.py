"""A directory has the semantics of object storage, without obstore."""

import sys
import threading

import pytest

from cpr_ext.errors import RemoteError, UsageError
from cpr_ext.storage.remote import RemoteOptions, open_objects
from cpr_ext.storage.remote.file_objects import FileObjects
from python_tests.helpers import assert_same
from python_tests.storage.remote.test_remote_copy import begin, close_and_lose, train_and_save


@pytest.fixture
def objects(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)  # an import of it fails
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    return open_objects(RemoteOptions(f"file://{tmp_path}/new/a b"))


def test_objects_are_created_once_replaced_read_in_parts_listed_and_removed(objects):
    assert isinstance(objects, FileObjects)
    assert objects.list("states/") == []
    assert objects.create("states/1", b"12345")
    assert not objects.create("states/1", b"other")
    assert objects.read("states/1") == b"12345"
    assert objects.read("states/1", 1, 3) == b"23"
    objects.write("objects/shard/a", iter([b"ab", b"cd"]))
    objects.write("objects/shard/a", iter([b"new"]))
    assert objects.read("objects/shard/a") == b"new"
    assert objects.list("objects/") == ["objects/shard/a"]
    objects.delete("states/1")
    objects.delete("states/1")
    with pytest.raises(FileNotFoundError):
        objects.read("states/1")


def test_what_is_half_written_is_no_object(objects, tmp_path):
    def broken():
        yield b"half"
        assert objects.list("objects/") == []
        raise OSError(28, "No space left on device")

    with pytest.raises(RemoteError, match="did not write 'objects/a': No space left on device"):
        objects.write("objects/a", broken())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_of_many_who_create_an_object_one_succeeds(objects):
    created = []

    def create(number):
        created.append(objects.create("states/1", b"%d" % number))

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(created) == [False] * 7 + [True]


def test_an_address_without_a_path_is_refused():
    with pytest.raises(UsageError, match="file:///path"):
        open_objects(RemoteOptions("file://host/path"))


def test_a_new_machine_recovers_from_a_directory(objects, tmp_path):
    address = f"file://{tmp_path}/remote"
    trained = begin(tmp_path / "a", remote=address)
    train_and_save(trained)
    train_and_save(trained)
    rows = close_and_lose(trained)
    other = begin(tmp_path / "b", seed=9, remote=address)
    assert other.report.step == 4
    assert_same(other.rows(), rows)
    other.checkpointer.close()
