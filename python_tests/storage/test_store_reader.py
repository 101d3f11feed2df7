"""What a reader of a store refuses, and that it keeps what it reads."""

import shutil

import pytest

from cpr_ext.errors import DamageError, StoreError, UsageError
from cpr_ext.storage.job_stores import find_stores
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


def test_one_store_is_no_job_of_several_and_no_stores_are_none(store):
    assert find_stores(store).stores == (store,)
    assert find_stores([store]).stores == (store,)
    with pytest.raises(StoreError, match="is one store, not a job of 3 workers"):
        find_stores(store, world_size=3)
    with pytest.raises(StoreError, match="the list of stores is empty"):
        find_stores([])


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
