"""A remote store is always a committed state, never older than the last acknowledged one."""

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

import cpr_ext
from cpr_ext.storage import manifest
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.wings.remote import FencedError, RemoteError, fetch_store, remote_writer
from cpr_ext.wings.remote.head import HEAD
from cpr_ext.wings.remote.remote_state import newest_state, objects_of
from cpr_ext.wings.remote.remote_writer import RemoteWriter
from cpr_ext.wings.tools.maintenance import verify
from python_tests.helpers import Trained
from python_tests.storage.records import signed
from python_tests.wings.remote.faulty_objects import Cut, FaultyObjects, MemoryObjects
from python_tests.wings.tools.maintenance.stores import TABLES, trained_store

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


def state_of(directory):
    return StoreReader(directory).manifest


def writer_of(objects, directory, **options):
    opened = RemoteWriter(objects, directory, **options)
    opened.open(state_of(directory))
    return opened


def copied(directory, objects):
    """The newest state of a remote store, which is sound."""
    state = fetch_store(objects, directory)
    assert verify(directory).is_sound
    return state


def test_what_is_there_is_not_sent_again(stores):
    objects = MemoryObjects()
    writer_of(objects, stores[0]).copy(state_of(stores[0]))
    again, state = writer_of(objects, stores[1]), state_of(stores[1])
    sent = []
    again.spend = sent.append
    missing = again.missing_bytes(state)
    again.copy(state)
    assert sum(sent) == missing < state.file_bytes
    assert again.missing_bytes(state) == 0
    # Nor what was sent in vain.
    objects = MemoryObjects()
    faulty = FaultyObjects(objects, 10**9, "fails")
    writer = writer_of(faulty, stores[1])
    faulty.at = faulty.count + 1 + len(list(state.records()))  # the state itself
    with suppress(RemoteError, TimeoutError):
        writer.copy(state)
    assert newest_state(objects) is None
    sent.clear()
    writer.spend = sent.append
    writer.copy(state)
    assert sum(sent) == 0
    assert replace(newest_state(objects), retired={}) == writer.newest


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_request_leaves_a_committed_state(stores, tmp_path, fault):
    first, second = (state_of(store) for store in stores)
    at, was_reached = 0, True
    while was_reached:
        objects = MemoryObjects()
        acknowledged = writer_of(objects, stores[0]).copy(first)
        faulty = FaultyObjects(objects, at, fault)
        with suppress(RemoteError, TimeoutError, Cut):
            acknowledged = writer_of(faulty, stores[1]).copy(second)
        state = newest_state(objects)
        assert state.manifest.descends_from(acknowledged.manifest.commit_id)
        assert state.manifest in (first, second)
        assert objects_of(state.manifest).keys() <= objects.held.keys()
        # The same store comes again, and adds its state.
        assert writer_of(objects, stores[1]).copy(second).manifest == second
        was_reached = faulty.count > at
        at += 1
    assert at > 10
    copied(tmp_path / "copy", objects)


@pytest.mark.parametrize("fault", ["fails", "answer lost", "twice"])
@pytest.mark.parametrize("is_newer", [False, True])
def test_after_a_fault_at_any_request_the_same_writer_goes_on(stores, fault, is_newer):
    state = state_of(stores[1])
    later = state.next(state.dense, state.rows) if is_newer else state
    at, was_reached = 0, True
    while was_reached:
        objects = MemoryObjects()
        faulty = FaultyObjects(objects, 10**9, fault)
        writer = writer_of(faulty, stores[1])
        faulty.at = faulty.count + at
        with suppress(*(() if fault == "twice" else (RemoteError, TimeoutError))):
            writer.copy(state)
        was_reached, faulty.at = faulty.count > faulty.at, 10**9
        assert writer.copy(later) == newest_state(objects)
        assert newest_state(objects).manifest == later
        at += 1
    assert at > 5


def test_of_two_writers_one_wins_and_whoever_opens_the_newest_state_takes_over(stores, tmp_path):
    objects = MemoryObjects()
    one, other = writer_of(objects, stores[0]), writer_of(objects, stores[1])
    one.copy(state_of(stores[0]))
    with pytest.raises(FencedError, match="another process"):
        other.copy(state_of(stores[1]))
    assert copied(tmp_path / "copy", objects).manifest == state_of(stores[0])
    new = writer_of(objects, stores[0])
    with pytest.raises(FencedError):
        one.copy(state_of(stores[0]))
    new.copy(state_of(stores[0]))


REFUSALS = {
    "another store": "another store",
    "an earlier state": r"earlier state.*cpr fetch.*another address",
    "another history": "trained on its own",
}


@pytest.mark.parametrize("which", REFUSALS)
def test_a_store_that_does_not_follow_from_the_copy_leaves_it_alone(stores, tmp_path, which):
    objects = MemoryObjects()
    writer_of(objects, stores[1]).copy(state_of(stores[1]))
    before = objects.held[HEAD]
    store = tmp_path / "store"
    if which == "another store":
        trained_store(store, snapshots=1).checkpointer.close()
    else:
        shutil.copytree(stores[0], store)
    if which == "another history":
        trained = reopened(store)
        trained.train(3)
        trained.checkpointer.save()
        trained.checkpointer.close()
    with pytest.raises(cpr_ext.StoreError, match=REFUSALS[which]):
        writer_of(objects, store)
    assert objects.held[HEAD] == before


def test_the_newest_copied_state_stays_an_ancestor_however_many_commits_follow(
    stores, tmp_path, monkeypatch
):
    monkeypatch.setattr(manifest, "ANCESTORS_KEPT", 2)
    objects = MemoryObjects()
    shutil.copytree(stores[0], tmp_path / "store")
    writer_of(objects, tmp_path / "store").copy(state_of(tmp_path / "store"))
    trained = reopened(tmp_path / "store")
    trained.store.origin = SimpleNamespace(
        pinned=frozenset({newest_state(objects).manifest.commit_id}),
        on_commit=lambda state: None,
        end=lambda waits: None,
    )
    for _ in range(6):
        trained.train(1)
        trained.checkpointer.save()
        trained.checkpointer.wait()
    trained.checkpointer.close()
    assert len(state_of(tmp_path / "store").ancestors) == 3
    writer_of(objects, tmp_path / "store")


def reopened(directory):
    trained = Trained(directory, TABLES, num_shards=3, schedule=cpr_ext.EverySteps(10**9))
    trained.checkpointer.recover()
    return trained


def test_objects_that_no_state_names_stay_for_readers_for_a_while(stores, tmp_path, monkeypatch):
    objects, now = MemoryObjects(), [1e9]
    monkeypatch.setattr(remote_writer.time, "time", lambda: now[0])
    objects.held["objects/left over"] = b"x"
    writer = writer_of(objects, stores[1], keep_seconds=100)
    state = state_of(stores[1])
    writer.copy(state)
    older = set(objects.list("objects/"))
    fewer = state.next((), ())
    now[0] += 50
    writer.copy(fewer)
    assert set(objects.list("objects/")) == older
    now[0] += 51
    writer.copy(fewer)
    assert older - set(objects.list("objects/")) == {"objects/left over"}
    now[0] += 50
    writer.copy(fewer)
    assert objects.list("objects/") == []


def test_a_writer_that_was_replaced_removes_nothing_of_its_successor(stores, tmp_path):
    objects, state = MemoryObjects(), state_of(stores[1])
    old = writer_of(objects, stores[0], keep_seconds=0)
    remove = old._remove_old

    def remove_late(before):
        writer_of(objects, stores[1], keep_seconds=0).copy(state)
        remove(before)

    old._remove_old = remove_late
    old.copy(state_of(stores[0]))
    assert copied(tmp_path / "copy", objects).manifest == state


@pytest.mark.parametrize("what", ["head", "object"])
def test_damage_is_named(stores, tmp_path, what):
    objects = MemoryObjects()
    state = writer_of(objects, stores[0]).copy(state_of(stores[0]))
    key = HEAD if what == "head" else next(iter(state.checksums))
    data = bytearray(objects.held[key])
    data[len(data) // 2] ^= 1
    objects.held[key] = bytes(data)
    with pytest.raises(cpr_ext.DamageError, match=key.rsplit("/", 1)[-1]):
        fetch_store(objects, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["LOCK"]
    del objects.held[key]
    with pytest.raises(cpr_ext.StoreError, match=r"lacks|no state"):
        fetch_store(objects, tmp_path / "copy")


CHANGES = {
    "no checksum": lambda content: content["checksums"].clear(),
    "a checksum that is none": lambda content: content["checksums"].update(a="x"),
    "no manifest": lambda content: content.pop("manifest"),
    "a manifest of nothing": lambda content: content.update(manifest=[]),
    "a time that is none": lambda content: content.update(unix_seconds=[]),
    "a time that no file has": lambda content: content.update(unix_seconds=1e308),
    "retired since never": lambda content: content["retired"].update(a=None),
}


def test_a_state_that_makes_no_sense_is_damage(stores, tmp_path):
    objects = MemoryObjects()
    writer_of(objects, stores[0]).copy(state_of(stores[0]))
    sound = objects.held[HEAD]
    for change in CHANGES.values():
        document = json.loads(sound)
        change(document["content"])
        objects.held[HEAD] = signed(document["format"], document["content"])
        with pytest.raises(cpr_ext.DamageError, match=HEAD):
            fetch_store(objects, tmp_path / "copy")
