"""What a copy asks of object storage, of each service; and a machine that recovers from each."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from cpr_ext.errors import RemoteError, UsageError
from cpr_ext.wings.remote import RemoteOptions, open_objects
from cpr_ext.wings.remote.head import Head, require_conditional_puts
from cpr_ext.wings.remote.objects import PART_BYTES
from cpr_ext.wings.remote.remote_state import newest_state
from python_tests.helpers import assert_same
from python_tests.wings.remote.faulty_objects import FaultyObjects, MemoryObjects
from python_tests.wings.remote.servers import azure_service, empty_bucket, s3_service
from python_tests.wings.remote.test_remote_copy import begin, close_and_lose, train_and_save


@contextmanager
def s3():
    with s3_service() as service:
        yield empty_bucket(service)


@pytest.fixture(params=["file", "s3", "azure"])
def options(request, tmp_path):
    if request.param == "file":
        yield RemoteOptions(f"file://{tmp_path}/new/a b")
        return
    with {"s3": s3, "azure": azure_service}[request.param]() as found:
        yield found


@pytest.fixture
def objects(options):
    return open_objects(options)


def test_objects_are_written_read_in_ranges_listed_and_removed(objects):
    assert objects.list("objects/") == []
    objects.write("objects/b", iter([b"12", b"345"]))
    assert objects.read("objects/b") == b"12345"
    assert objects.read("objects/b", 1, 3) == b"23"
    objects.write("objects/b", iter([b"new"]))
    assert objects.read("objects/b") == b"new"
    chunk = bytes(range(256)) * 4096
    objects.write("objects/c", (chunk for _ in range(PART_BYTES // len(chunk) + 2)))
    assert objects.read("objects/c", PART_BYTES - 2, PART_BYTES + 2) == chunk[-2:] + chunk[:2]
    assert sorted(objects.list("objects/")) == ["objects/b", "objects/c"]
    for _ in range(2):
        objects.delete("objects/b")
    assert objects.list("objects/") == ["objects/c"]
    for read in (objects.read, objects.read_tagged):
        with pytest.raises(FileNotFoundError):
            read("objects/b")


def test_an_object_is_replaced_only_by_who_has_read_it(objects):
    first = objects.replace("HEAD", b"1", None)
    assert first
    assert objects.replace("HEAD", b"other", None) is None
    assert objects.read_tagged("HEAD") == (b"1", first)
    second = objects.replace("HEAD", b"2", first)
    assert second
    assert objects.replace("HEAD", b"late", first) is None
    assert objects.read("HEAD") == b"2"
    objects.delete("HEAD")
    assert objects.replace("HEAD", b"3", second) is None
    assert objects.list("") == []
    require_conditional_puts(objects)
    assert objects.list("") == []


def test_of_many_who_replace_an_object_one_succeeds(objects):
    tag = objects.replace("HEAD", b"0", None)
    with ThreadPoolExecutor(8) as threads:
        tags = threads.map(lambda n: objects.replace("HEAD", b"%d" % n, tag), range(1, 9))
    assert [found is not None for found in tags].count(True) == 1


def test_a_new_machine_recovers(options, tmp_path, caplog):
    trained = begin(tmp_path / "a", remote=options)
    train_and_save(trained)
    train_and_save(trained)
    rows = close_and_lose(trained)
    other = begin(tmp_path / "b", seed=9, remote=options)
    assert other.report.step == 4
    assert_same(other.rows(), rows)
    other.checkpointer.close()
    assert newest_state(open_objects(options)).step == 4
    assert not any(value in caplog.text for key, value in options.config.items() if "key" in key)


# --- a directory ---


def test_a_directory_needs_no_package_and_what_is_half_written_there_is_no_object(
    tmp_path, monkeypatch
):
    for module in ("obstore", "obstore.store"):
        monkeypatch.setitem(sys.modules, module, None)  # an import of it fails
    with pytest.raises(UsageError, match="file:///path"):
        open_objects(RemoteOptions("file://host/path"))
    objects = open_objects(RemoteOptions(f"file://{tmp_path}"))

    def broken():
        yield b"half"
        assert objects.list("objects/") == []
        raise OSError(28, "No space left on device")

    with pytest.raises(RemoteError, match="did not write 'objects/a': No space left on device"):
        objects.write("objects/a", broken())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# --- the one object that is replaced ---


@pytest.mark.parametrize("fault", ["fails", "answer lost", "twice"])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_request_whose_outcome_is_not_known_is_made_again(fault, is_new):
    objects = MemoryObjects()
    if not is_new:
        Head(objects).replace(b"{0}")
    head = Head(FaultyObjects(objects, 1, fault))
    head.read()
    try:
        assert head.replace(b"{1}")
        assert fault == "twice"
    except (RemoteError, TimeoutError):
        assert fault != "twice"
    other = Head(objects)
    other.read()
    assert head.replace(b"{2}")  # though it may find its own first try
    assert not other.replace(b"{other}")
    assert other.data == b"{2}"


class Careless(MemoryObjects):
    """Ignores conditions, and answers with pages."""

    def replace(self, key, data, tag):
        self.held[key] = data
        return "a tag"

    def read_tagged(self, key):
        return b"<html>", "a tag"


def test_a_service_without_conditional_writes_or_that_answers_with_pages_is_named():
    with pytest.raises(RemoteError, match=r"ignores conditional writes .*If-Match"):
        require_conditional_puts(Careless())
    with pytest.raises(RemoteError, match="Check the address"):
        newest_state(Careless())
