"""What a reader of a store refuses, and that it keeps what it reads."""

import os
import shutil

import pytest

from cpr_ext.errors import DamageError, StoreError, UsageError
from cpr_ext.storage import filesystem, locks
from cpr_ext.storage.store_reader import StoreReader
from python_tests.storage import records
from python_tests.wings.tools.maintenance.stores import trained_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    directory = tmp_path_factory.mktemp("reader") / "store"
    trained_store(directory, snapshots=1).checkpointer.close()
    return directory


def test_segments_elsewhere_are_not_followed(store, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    (copy / "segments").rename(tmp_path / "elsewhere")
    (copy / "segments").symlink_to(tmp_path / "elsewhere")
    reader = StoreReader(copy)
    with pytest.raises(DamageError, match="segments"):
        reader.open(reader.newest())


def test_a_reader_refuses_what_is_not_there(store):
    reader = StoreReader(store)
    with pytest.raises(UsageError, match="has no table 'none'; it has: "):
        reader.table("none")
    assert reader.newest() == reader.manifest.dense[-1]
    assert reader.is_gone() is False
    reader.manifest = records.manifest_of()
    assert reader.is_gone() is False
    with pytest.raises(StoreError, match="holds no snapshot"):
        reader.newest()
    with pytest.raises(StoreError, match="holds no full-recovery point"):
        reader.newest(full=True)
    base = records.record(9)  # another commit has removed its file
    reader.manifest = records.manifest_of([records.record(9, "dense")], [(base,), (base,)])
    assert reader.is_gone() is True


def test_a_store_is_read_by_somebody_until_the_lease_ends(store):
    with locks.reader_lease(store):
        assert locks.has_readers(store)
        with locks.reader_lease(store):
            pass
        assert locks.has_readers(store)
    for _ in range(2):
        assert not locks.has_readers(store)  # who asks holds nothing of it


def test_a_read_that_ends_before_its_file_is_an_error_and_none_of_a_file_that_shrank(
    tmp_path, monkeypatch
):
    path = tmp_path / "file"
    path.write_bytes(b"123")
    assert filesystem.read_whole(path, 3) == b"123"
    with pytest.raises(DamageError, match="3 bytes; at most 2"):
        filesystem.read_whole(path, 2)
    with path.open("rb") as file:
        filesystem.require_all_bytes(file.fileno(), 2, 4)
    fstat = os.fstat

    def larger(descriptor):
        found = fstat(descriptor)
        return os.stat_result((*found[:6], 5, *found[7:]))

    monkeypatch.setattr(os, "fstat", larger)
    with pytest.raises(OSError, match="3 of 5 bytes came"):
        filesystem.read_whole(path, 9)
