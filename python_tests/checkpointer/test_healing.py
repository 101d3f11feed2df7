"""Recovery reads damaged files from the copy in object storage."""

from unittest.mock import patch

import pytest

import cpr_ext
from cpr_ext import StoreOptions
from cpr_ext.wings.remote import RemoteOptions
from python_tests.helpers import Trained, assert_same, flip
from python_tests.wings.remote.faulty_objects import MemoryObjects
from python_tests.wings.remote.test_remote_copy import OPTIONS, SMALL, begin, train_and_save


@pytest.fixture
def objects():
    found = MemoryObjects()
    with patch("cpr_ext.wings.remote.opening.open_objects", lambda options: found):
        yield found


@pytest.fixture
def closed(objects, tmp_path):
    """A closed store of a base and two partial snapshots, copied; and its rows in a recovery."""
    trained = begin(tmp_path / "a")
    train_and_save(trained)
    train_and_save(trained)
    trained.checkpointer.close()
    fresh = begin(tmp_path / "a", seed=3)
    rows = fresh.rows()
    reader = fresh.store.view()
    fresh.die()
    fresh.checkpointer.store.origin.close()
    return tmp_path / "a", rows, reader


def break_file(path, how):
    if how == "missing":
        path.unlink()
    elif how == "header":
        flip(path, 9)
    else:
        flip(path, path.stat().st_size - 100)


@pytest.mark.parametrize("how", ["missing", "header", "content"])
@pytest.mark.parametrize("kind", ["dense", "rows"])
def test_a_damaged_file_is_read_from_the_copy(closed, objects, how, kind, caplog):
    store, rows, reader = closed
    manifest = reader.manifest
    path = reader.path_of((manifest.dense if kind == "dense" else manifest.rows)[-1])
    before = path.read_bytes()
    break_file(path, how)
    objects.bytes_read = 0
    fresh = begin(store, seed=4)
    assert fresh.report.step == 4
    assert fresh.report.damaged_segments == []
    assert_same(fresh.rows(), rows)
    assert path.read_bytes() == before
    assert objects.bytes_read < 2 * len(before) + 20_000  # and the document of the state
    assert "was read from the remote store" in caplog.text
    fresh.checkpointer.close()


def test_what_the_copy_lacks_falls_back_or_raises_as_without_one(closed, objects):
    store, _, reader = closed
    record = reader.manifest.rows[0]
    break_file(reader.path_of(record), "content")
    begun = Trained(store, SMALL, store=StoreOptions(remote=RemoteOptions("memory:///")), **OPTIONS)
    assert begun.checkpointer.recover(on_damage="raise").damaged_segments == []
    assert_same(begun.rows(), closed[1])
    begun.die()
    begun.store.origin.close()
    break_file(reader.path_of(record), "content")
    (key,) = [key for key in objects.held if record.file in key]
    objects.held[key] = objects.held[key][:-5000]
    fresh = Trained(store, SMALL, store=StoreOptions(remote=RemoteOptions("memory:///")), **OPTIONS)
    with pytest.raises(cpr_ext.DamageError):
        fresh.checkpointer.recover(on_damage="raise")
    report = fresh.checkpointer.recover()
    assert [d.path.name for d in report.damaged_segments] == [record.file]
    fresh.checkpointer.close()


def test_a_live_model_gets_a_lost_shard_from_the_copy(objects, tmp_path):
    trained = begin(tmp_path / "a")
    train_and_save(trained)
    assert trained.store.origin.wait(30)
    break_file(trained.store.path_of(trained.store.manifest.rows[0]), "missing")
    assert trained.checkpointer.recover(shards=[1]).damaged_segments == []
    trained.checkpointer.close()
