"""A remote store is always a committed state, never older than the last acknowledged one."""

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import cpr_ext
from cpr_ext.storage import manifest
from cpr_ext.storage.checksummed_json import read_checksummed
from cpr_ext.storage.remote import (
    FencedError,
    RemoteError,
    fetch_store,
    range_reading,
    remote_writer,
)
from cpr_ext.storage.remote.remote_state import (
    RemoteDirectory,
    StoreView,
    newest_state,
    state_numbers,
)
from cpr_ext.storage.remote.remote_writer import STATES_KEPT, RemoteWriter
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.tools.maintenance import verify
from python_tests.helpers import Trained, assert_same
from python_tests.storage.remote.faulty_objects import Cut, FaultyObjects, MemoryObjects
from python_tests.tools.maintenance.stores import TABLES, recovered, trained_store

FAULTS = ["fails", "answer lost", "twice", "ends before", "ends after"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two committed states of one store, each in a directory of its own."""
    root = tmp_path_factory.mktemp("remote")
    trained = trained_store(root / "store", snapshots=1)
    shutil.copytree(root / "store", root / "first")
    trained.train(2)
    trained.checkpointer.save()
    trained.checkpointer.close()
    shutil.copytree(root / "store", root / "second")
    return root / "first", root / "second"


def view_of(directory):
    reader = StoreReader(directory)
    return StoreView(
        read_checksummed(directory / "STORE.json", "cpr_ext.store"),
        {m.directory.name: RemoteDirectory.of(m) for m in (reader.dense, *reader.shards)},
        reader.newest().last_step,
    )


def writer_of(objects, directory, writer="a"):
    """Open the copy for a store that has made all claims on it."""
    opened, view = RemoteWriter(objects, directory, writer), view_of(directory)
    newest = newest_state(objects)
    opened.open(view if newest is None else claimed(view, newest.claim), lambda claim: None)
    return opened


def claimed(view, claim):
    """The same state of a store with this claim among its ancestors."""
    dense = view.directories["dense"]
    dense = replace(dense, ancestors=(*dense.ancestors, claim))
    return replace(view, directories={**view.directories, "dense": dense})


def copied(directory, objects):
    """The newest state of a remote store, which is sound."""
    state = fetch_store(objects, directory)
    assert verify(directory).is_sound
    return state


def test_a_machine_is_lost_and_the_copy_gives_back_every_bit(stores, tmp_path):
    objects = MemoryObjects()
    writer_of(objects, stores[0]).copy(view_of(stores[0]))
    writer_of(objects, stores[1]).copy(view_of(stores[1]))
    copied(tmp_path / "copy", objects)
    _, rows, _ = recovered(tmp_path / "copy")
    shutil.copytree(stores[1], tmp_path / "expected")
    _, expected, _ = recovered(tmp_path / "expected")
    assert_same(rows, expected)


def test_what_is_there_is_not_sent_again(stores):
    objects = MemoryObjects()
    writer_of(objects, stores[0]).copy(view_of(stores[0]))
    again, view = writer_of(objects, stores[1]), view_of(stores[1])
    sent = []
    again.spend = sent.append
    missing = again.missing_bytes(view)
    again.copy(view)
    assert sum(sent) == missing < sum(record.file_bytes for _, record in view.records().values())
    assert again.missing_bytes(view) == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_request_leaves_a_committed_state(stores, tmp_path, fault):
    first_view, view = (view_of(store) for store in stores)
    at, was_reached = 0, True
    while was_reached:
        objects = MemoryObjects()
        acknowledged = writer_of(objects, stores[0]).copy(first_view)
        faulty = FaultyObjects(objects, at, fault)
        with suppress(RemoteError, TimeoutError, Cut):
            acknowledged = writer_of(faulty, stores[1]).copy(view)
        state = newest_state(objects)
        assert state.number >= acknowledged.number
        assert state.view.records() in (first_view.records(), view.records())
        assert state.view.commit_id in (first_view.commit_id, view.commit_id)
        assert state.view.records().keys() <= objects.held.keys()
        # The same store comes again, and adds its state.
        assert writer_of(objects, stores[1]).copy(view).view == view
        was_reached = faulty.count > at
        at += 1
    assert at > 10
    copied(tmp_path / "copy", objects)


@pytest.mark.parametrize("fault", ["fails", "answer lost", "twice"])
@pytest.mark.parametrize("is_newer", [False, True])
def test_after_a_fault_at_any_request_the_same_writer_goes_on(stores, fault, is_newer):
    view = view_of(stores[1])
    later = replace(view, step=view.step + 1) if is_newer else view
    at, was_reached = 0, True
    while was_reached:
        objects = MemoryObjects()
        faulty = FaultyObjects(objects, 10**9, fault)
        writer = writer_of(faulty, stores[1])
        faulty.at = faulty.count + at
        with suppress(*(() if fault == "twice" else (RemoteError, TimeoutError))):
            writer.copy(view)
        was_reached, faulty.at = faulty.count > faulty.at, 10**9
        assert writer.copy(later) == newest_state(objects)
        assert newest_state(objects).view == later
        at += 1
    assert at > 5


def test_of_two_writers_one_wins_and_the_other_is_told(stores, tmp_path):
    objects = MemoryObjects()
    one, other = writer_of(objects, stores[0]), writer_of(objects, stores[1])
    one.copy(view_of(stores[0]))
    with pytest.raises(FencedError, match="another process"):
        other.copy(view_of(stores[1]))
    assert copied(tmp_path / "copy", objects).number == 1


def test_a_writer_that_slept_through_many_states_is_told(stores):
    objects = MemoryObjects()
    late, busy = writer_of(objects, stores[0]), writer_of(objects, stores[1])
    for _ in range(STATES_KEPT + 3):
        busy.copy(view_of(stores[1]))
    assert len(state_numbers(objects)) == STATES_KEPT
    with pytest.raises(FencedError):
        late.copy(view_of(stores[0]))
    assert newest_state(objects).number == STATES_KEPT + 3


def test_the_copy_of_another_store_is_left_alone(stores, tmp_path):
    objects = MemoryObjects()
    writer_of(objects, stores[0]).copy(view_of(stores[0]))
    other = trained_store(tmp_path / "other", snapshots=1)
    other.checkpointer.close()
    with pytest.raises(cpr_ext.StoreError, match="another store"):
        writer_of(objects, tmp_path / "other")
    assert newest_state(objects).number == 1


def test_whoever_opens_the_newest_state_takes_over(stores):
    objects = MemoryObjects()
    old, view = writer_of(objects, stores[0]), view_of(stores[0])
    old.copy(view)
    new = writer_of(objects, stores[0], writer="b")
    with pytest.raises(FencedError):
        old.copy(view)
    new.copy(view)


def test_a_store_that_has_not_made_the_newest_claim_is_refused(stores):
    """Also where both are of the copy's state, and whoever claimed it has copied nothing."""
    objects, view, claims = MemoryObjects(), view_of(stores[0]), []
    first = RemoteWriter(objects, stores[0], "first")
    first.open(view, claims.append)
    first.copy(claimed(view, claims[0]))
    second = RemoteWriter(objects, stores[0], "second")
    second.open(claimed(view, claims[0]), claims.append)
    third = RemoteWriter(objects, stores[0], "third")
    with pytest.raises(cpr_ext.StoreError, match="has taken over the copy"):
        third.open(claimed(view, claims[0]), claims.append)
    third.open(claimed(newest_state(objects).view, claims[1]), claims.append)
    assert len(set(claims)) == 3


def test_a_claim_that_the_store_did_not_take_is_none_on_the_copy(stores):
    """A store that claims, and dies before the copy names its claim, continues."""
    objects, view = MemoryObjects(), view_of(stores[0])
    writer_of(objects, stores[0]).copy(view)
    number = newest_state(objects).number

    def fail(claim):
        raise cpr_ext.StorageError("no space")

    with pytest.raises(cpr_ext.StorageError):
        RemoteWriter(objects, stores[0], "b").open(claimed(view, newest_state(objects).claim), fail)
    assert newest_state(objects).number == number
    writer_of(objects, stores[0], "b").copy(view)


def test_a_store_put_back_to_an_earlier_state_does_not_continue_the_copy(stores):
    objects = MemoryObjects()
    writer_of(objects, stores[1]).copy(view_of(stores[1]))
    with pytest.raises(cpr_ext.StoreError, match=r"earlier state.*cpr fetch.*another address"):
        writer_of(objects, stores[0])
    assert newest_state(objects).view == view_of(stores[1])


def test_of_two_stores_that_were_one_only_the_copied_one_continues(stores, tmp_path):
    objects = MemoryObjects()
    writer_of(objects, stores[1]).copy(view_of(stores[1]))
    shutil.copytree(stores[0], tmp_path / "clone")
    trained = reopened(tmp_path / "clone")
    trained.train(3)
    trained.checkpointer.save()
    trained.checkpointer.close()
    with pytest.raises(cpr_ext.StoreError, match="trained on its own"):
        writer_of(objects, tmp_path / "clone")


def test_the_newest_copied_state_stays_an_ancestor_however_many_commits_follow(
    stores, tmp_path, monkeypatch
):
    monkeypatch.setattr(manifest, "ANCESTORS_KEPT", 2)
    objects = MemoryObjects()
    shutil.copytree(stores[0], tmp_path / "store")
    writer_of(objects, tmp_path / "store").copy(view_of(tmp_path / "store"))
    copied_commit = newest_state(objects).view.commit_id
    trained = reopened(tmp_path / "store")
    trained.store.dense.pinned = frozenset({copied_commit})
    for _ in range(6):
        trained.train(1)
        trained.checkpointer.save()
        trained.checkpointer.wait()
    trained.checkpointer.close()
    assert len(view_of(tmp_path / "store").directories["dense"].ancestors) == 3
    writer_of(objects, tmp_path / "store")


def reopened(directory):
    trained = Trained(directory, TABLES, num_shards=3, schedule=cpr_ext.EverySteps(10**9))
    trained.checkpointer.recover()
    return trained


def test_a_service_without_conditional_writes_is_refused(stores):
    class Careless(MemoryObjects):
        def create(self, key, data):
            self.held[key] = data
            return True

    with pytest.raises(RemoteError, match="conditional"):
        writer_of(Careless(), stores[0])


def test_a_writer_that_was_replaced_removes_nothing_of_its_successor(stores, tmp_path):
    objects, view = MemoryObjects(), view_of(stores[1])
    old = writer_of(objects, stores[0])
    tidy = old._tidy

    def tidy_late(before, state):
        writer_of(objects, stores[1], writer="b").copy(view)
        tidy(before, state)

    old._tidy = tidy_late
    old.copy(view_of(stores[0]))
    assert copied(tmp_path / "copy", objects).view == view


def test_objects_that_no_state_names_are_removed(stores):
    objects = MemoryObjects()
    objects.held["objects/shard-00000/left over"] = b"x"
    writer = writer_of(objects, stores[0])
    objects.held["objects/shard-00000/of another writer"] = b"x"
    writer.copy(view_of(stores[0]))
    assert "objects/shard-00000/of another writer" in objects.held
    assert not any("left over" in key or key.startswith("probes/") for key in objects.held)


@pytest.mark.parametrize("what", ["state", "object"])
def test_damage_is_named(stores, tmp_path, what):
    objects = MemoryObjects()
    state = writer_of(objects, stores[0]).copy(view_of(stores[0]))
    key = "states/000000000001.json" if what == "state" else next(iter(state.checksums))
    data = bytearray(objects.held[key])
    data[len(data) // 2] ^= 1
    objects.held[key] = bytes(data)
    with pytest.raises(cpr_ext.DamageError, match=key.rsplit("/", 1)[1]):
        fetch_store(objects, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["LOCK"]
    del objects.held[key]
    with pytest.raises(cpr_ext.StoreError, match=r"lacks|no state"):
        fetch_store(objects, tmp_path / "copy")


def test_one_shard_reads_only_its_own_bytes(stores, tmp_path):
    objects = MemoryObjects()
    state = writer_of(objects, stores[1]).copy(view_of(stores[1]))
    objects.bytes_read = 0
    fetch_store(objects, tmp_path / "copy", shards=["shard-00001"])
    own = sum(r.file_bytes for r in state.view.directories["shard-00001"].segments)
    assert objects.bytes_read == own + len(objects.held["states/000000000001.json"])


def test_a_state_that_names_other_places_is_refused(stores, tmp_path):
    objects = MemoryObjects()
    state = writer_of(objects, stores[0]).copy(view_of(stores[0]))
    directories = dict(state.view.directories)
    directories["../outside"] = directories.pop("dense")
    view = replace(state.view, directories=directories)
    hostile = replace(state, view=view, checksums=dict.fromkeys(view.records(), 0))
    objects.held["states/000000000001.json"] = hostile.to_bytes()
    with pytest.raises(cpr_ext.DamageError, match="no directory"):
        fetch_store(objects, tmp_path / "copy")


def test_few_files_are_open_whatever_the_number_of_segments(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    trained = trained_store(tmp_path / "store" / "a", snapshots=20, rebase_after=None)
    trained.checkpointer.close()
    store, objects = tmp_path / "store" / "a", MemoryObjects()
    view = view_of(store)
    monkeypatch.setattr(remote_writer, "MOST_OPEN", 2)
    most = watch_descriptors(monkeypatch)
    before = len(list(Path("/proc/self/fd").iterdir()))
    writer_of(objects, store).copy(view)
    fetch_store(objects, tmp_path / "copy")
    assert len(view.records()) > 60
    assert max(most) - before < 40
    assert verify(tmp_path / "copy").is_sound


def watch_descriptors(monkeypatch):
    """How many descriptors are open at each read and write of the copy."""
    found = []
    for module, name in ((remote_writer, "open_regular"), (range_reading, "create_anew")):
        real = getattr(module, name)

        def opened(*arguments, _real=real, **options):
            found.append(len(list(Path("/proc/self/fd").iterdir())))
            return _real(*arguments, **options)

        monkeypatch.setattr(module, name, opened)
    return found


def test_what_was_sent_in_vain_is_not_sent_again(stores):
    objects, view = MemoryObjects(), view_of(stores[1])
    faulty = FaultyObjects(objects, 10**9, "fails")
    writer = writer_of(faulty, stores[1])
    faulty.at = faulty.count + 1 + len(view.records())  # the state itself
    with suppress(RemoteError, TimeoutError):
        writer.copy(view)
    assert newest_state(objects) is None
    sent = []
    writer.spend = sent.append
    writer.copy(view)
    assert sum(sent) == 0
