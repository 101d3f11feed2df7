"""A publication in object storage, and faults at any request for it."""

from contextlib import contextmanager, suppress
from unittest.mock import patch

import pytest

import cpr_ext
from cpr_ext.wings.publishing import Subscriber, publish, read_publication
from cpr_ext.wings.publishing.remote_place import RemotePlace
from cpr_ext.wings.remote import RemoteError, range_reading
from python_tests.helpers import assert_same
from python_tests.wings.publishing.consumers import (
    assert_serves_what_recovery_restores,
    served,
    train_and_save,
    weights,
)
from python_tests.wings.remote.faulty_objects import Cut, FaultyObjects, MemoryObjects

ADDRESS = "memory:///rows"


@contextmanager
def at(objects):
    """All addresses lead to these objects."""
    with (
        patch("cpr_ext.wings.publishing.places.open_objects", lambda options: objects),
        patch.object(range_reading, "FIRST_PAUSE_SECONDS", 0.0),
    ):
        yield objects


@pytest.fixture
def objects():
    with at(MemoryObjects()) as found:
        yield found


def test_a_subscriber_reads_only_its_own_tables(objects, trained):
    publish(trained.store.directory, ADDRESS)
    objects.bytes_read = 0
    applied = Subscriber(ADDRESS, {}).poll()
    whole = sum(len(data) for key, data in objects.held.items() if key.startswith("files/"))
    assert applied.file_bytes < whole / 4
    assert objects.bytes_read < whole / 2


@pytest.mark.parametrize("fault", ["fails", "answer lost", "twice", "ends before", "ends after"])
def test_a_fault_at_any_request_leaves_the_old_state_or_the_new_one(trained, fault):
    store, inner = trained.store.directory, MemoryObjects()
    with at(inner):
        publish(store, ADDRESS)
        held = dict(inner.held)
        train_and_save(trained)
        publish(store, ADDRESS)
        states = [{}, {}]
        for tables, content in zip(states, (held, inner.held), strict=True):
            tables.update(served())
            with at(MemoryObjects()) as other:
                other.held = dict(content)
                Subscriber(ADDRESS, tables).poll()
    number, was_reached = 0, True
    while was_reached:
        inner.held = dict(held)
        faulty = FaultyObjects(inner, number, fault)
        with at(faulty), suppress(RemoteError, TimeoutError, Cut):
            publish(store, ADDRESS)
        was_reached = faulty.count > number
        number += 1
        with at(inner):
            found = read_publication(ADDRESS).number
            tables = served()
            assert Subscriber(ADDRESS, tables).poll().number == found
            assert_same(weights(tables), weights(states[found - 1]))
            publish(store, ADDRESS)  # the same publisher comes again
            assert Subscriber(ADDRESS, tables).poll().number == 2
            assert_same(weights(tables), weights(states[1]))
    assert number > 6


def test_a_fault_at_any_request_of_a_poll_changes_no_row(trained):
    store, number, was_reached = trained.store.directory, 0, True
    with at(MemoryObjects()) as inner:
        publish(store, ADDRESS)
    while was_reached:
        tables = served()
        before, faulty = weights(tables), FaultyObjects(inner, number, "fails")
        with at(faulty):
            subscriber = Subscriber(ADDRESS, tables)
            try:
                subscriber.poll()
            except RemoteError:
                assert_same(weights(tables), before)
                subscriber.poll()
            assert subscriber.number == 1
        was_reached = faulty.count > number
        number += 1
    assert number > 4


def test_old_files_are_removed_and_a_late_subscriber_catches_up(objects, trained):
    tables = served()
    late = Subscriber(ADDRESS, tables)
    store = trained.store.directory
    publish(store, ADDRESS)
    late.poll()
    for _ in range(5):
        train_and_save(trained)
        publish(store, ADDRESS, renew_after=0.1)
    index = read_publication(ADDRESS)
    named = sum(len(update.files) for update in index.updates)
    assert named <= len(objects.list("files/")) < named + 20
    late.poll()
    assert_serves_what_recovery_restores(tables, trained)


def test_a_damaged_or_missing_file_is_named_and_changes_no_row(objects, trained):
    publish(trained.store.directory, ADDRESS)
    key = objects.list("files/")[0]
    data, tables = objects.held[key], served()
    before = weights(tables)
    for held in (data[:-1] + bytes([data[-1] ^ 1]), data[:-1], None):
        objects.held |= {key: held}
        if held is None:
            del objects.held[key]
        with pytest.raises(cpr_ext.DamageError, match="files/"):
            Subscriber(ADDRESS, tables).poll()
        assert_same(weights(tables), before)
    objects.held = {"objects/a": b"x"}
    with pytest.raises(cpr_ext.StoreError, match="is no publication"):
        publish(trained.store.directory, ADDRESS)
    assert list(objects.held) == ["objects/a"]


def test_a_publisher_that_slept_through_many_states_gets_an_error_and_removes_nothing(
    objects, trained, monkeypatch
):
    store = trained.store.directory
    publish(store, ADDRESS)
    add_index, meanwhile = RemotePlace.add_index, []

    def late(self, known, index):
        if not meanwhile:
            meanwhile.append(index)
            for _ in range(5):
                train_and_save(trained)
                publish(store, ADDRESS, renew_after=100)
        return add_index(self, known, index)

    monkeypatch.setattr(RemotePlace, "add_index", late)
    train_and_save(trained)
    with pytest.raises(cpr_ext.StoreError, match="another process has published"):
        publish(store, ADDRESS, renew_after=100)
    tables = served()
    assert Subscriber(ADDRESS, tables).poll().number == 6
    train_and_save(trained)
    assert publish(store, ADDRESS, renew_after=100).number == 7
    Subscriber(ADDRESS, tables).poll()
    assert_serves_what_recovery_restores(tables, trained)
