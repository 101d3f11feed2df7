"""A copy is read into a directory as it is, by one process at a time, and to its end."""

import os
import shutil

import pytest

import cpr_ext
from cpr_ext.wings.remote import RemoteError, RemoteOptions, fetch_store, fetching
from cpr_ext.wings.tools.maintenance import verify
from python_tests.wings.remote.faulty_objects import Cut, MemoryObjects
from python_tests.wings.remote.test_remote_writer import state_of, writer_of
from python_tests.wings.tools.maintenance.stores import recovered, trained_store


class Interrupted(MemoryObjects):
    """Calls ``then`` once, at the read of the ``at``-th object of a segment."""

    def __init__(self, at=2):
        super().__init__()
        self.left = at
        self.then = None

    def read(self, key, begin=0, end=None):
        if key.startswith("objects/") and self.then is not None:
            self.left -= 1
            if not self.left:
                then, self.then = self.then, None
                then()
        return super().read(key, begin, end)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Four committed states of one store, each of bases, so that none shares a segment."""
    root = tmp_path_factory.mktemp("fetching")
    trained = trained_store(root / "store", snapshots=1)
    found = []
    for number in range(4):
        trained.train(2)
        trained.checkpointer.save("base")
        trained.checkpointer.wait()
        shutil.copytree(root / "store", root / f"state{number}")
        found.append(root / f"state{number}")
    trained.checkpointer.close()
    return found


def copy_all(objects, stores, keep_seconds):
    """Let the job add its other states."""
    writer = writer_of(objects, stores[0], keep_seconds=keep_seconds)
    for store in stores[1:]:
        writer._directory = store
        writer.copy(state_of(store))


def names(directory):
    return {path.name for path in directory.iterdir()}


def test_a_reader_that_is_too_slow_takes_a_newer_state_and_does_not_blame_the_copy(
    stores, tmp_path, monkeypatch
):
    for tries in (fetching._TRIES, 1):
        objects = Interrupted()
        writer_of(objects, stores[0]).copy(state_of(stores[0]))
        objects.then = lambda objects=objects: copy_all(objects, stores, keep_seconds=0)
        monkeypatch.setattr(fetching, "_TRIES", tries)
        if tries > 1:
            assert fetch_store(objects, tmp_path / "copy").manifest == state_of(stores[3])
            assert verify(tmp_path / "copy").is_sound
            continue
        with pytest.raises(RemoteError, match=r"keep_seconds"):
            fetch_store(objects, tmp_path / "late")
        assert names(tmp_path / "late") == {"LOCK"}


def test_a_copy_is_read_through_a_link_by_one_process_and_writes_nothing_next_to_it(
    stores, tmp_path
):
    """So the directory may be a mount point, and its parent may be read-only."""
    objects = Interrupted()
    writer_of(objects, stores[0]).copy(state_of(stores[0]))
    place = tmp_path / "parent" / "store"
    place.mkdir(parents=True)
    (place / "lost+found").mkdir()
    (tmp_path / "link").symlink_to(place)
    before = place.stat()
    seen = []

    def look():
        seen.append((names(tmp_path), names(place.parent)))
        with pytest.raises(cpr_ext.StoreError, match="is being written by"):
            fetch_store(objects, tmp_path / "link")  # as another process does

    objects.then = look
    fetch_store(objects, tmp_path / "link")
    assert seen == [({"parent", "link"}, {"store"})]
    assert os.path.samestat(before, place.stat())
    assert verify(tmp_path / "link").is_sound
    with pytest.raises(cpr_ext.StoreError, match=r"holds 'MANIFEST\.json'"):
        fetch_store(objects, tmp_path / "link")


def test_a_read_that_was_cut_off_is_no_store_and_begins_again(stores, tmp_path, monkeypatch):
    objects = Interrupted(at=2)
    writer_of(objects, stores[0]).copy(state_of(stores[0]))

    def cut():
        raise Cut

    objects.then = cut
    directory = tmp_path / "copy"
    with monkeypatch.context() as patched:
        patched.setattr(fetching.shutil, "rmtree", lambda *_, **__: None)
        patched.setattr(fetching, "_clear", lambda directory: None)
        with pytest.raises(Cut):
            fetch_store(objects, directory)
    assert "segments" in names(directory)
    assert not verify(directory).is_sound
    with pytest.raises(cpr_ext.StoreError, match="was cut off"):
        recovered(directory)
    monkeypatch.setattr("cpr_ext.wings.remote.opening.open_objects", lambda options: objects)
    assert RemoteOptions("memory:///").open(directory).read_from == "memory:///"
    assert verify(directory).is_sound
