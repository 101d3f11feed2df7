"""A backup is a committed state, whatever the writer does and whenever its process ends."""

import importlib
import json
import os
import shutil

import pytest

from cpr_ext.errors import DamageError, StoreError, UsageError
from cpr_ext.storage import leases, manifest, replacing
from cpr_ext.storage.remote import filling, opening
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.tools.maintenance import backup, fetch, verify
from python_tests.faults.history_model import Objects
from python_tests.faults.mixtures import Run
from python_tests.helpers import flip

# ``cpr_ext.tools.maintenance.backup`` is the function.
backup_module = importlib.import_module("cpr_ext.tools.maintenance.backup")


@pytest.fixture
def run(tmp_path):
    """A run of three snapshots."""
    run = Run.at(tmp_path / "store")
    run.checkpointer.recover()
    for kind in ("base", "partial", "partial"):
        save(run, kind)
    yield run
    run.release()


def save(run, kind="partial"):
    run.train()
    run.save(kind)


def exact_step(directory):
    """The step that a store recovers to, every row of it."""
    assert verify(directory).is_sound
    other = Run.at(directory)
    try:
        report = other.checkpointer.recover()
        assert other.wrong_rows(report.step) == 0
        return report.step
    finally:
        other.release()


def step_of(directory):
    return StoreReader(directory).newest().last_step


def test_a_backup_of_a_store_in_use_has_its_newest_state_and_then_only_what_is_new(run, tmp_path):
    first = backup(tmp_path / "store", tmp_path / "backup")
    assert (first.step, first.step_before, first.segments_read) == (3, None, first.segments)
    save(run)
    second = backup(tmp_path / "store", tmp_path / "backup")
    assert (second.step, second.step_before) == (4, 3)
    assert second.segments_read == 3 < second.segments  # a dense part and two shards
    third = backup(tmp_path / "store", tmp_path / "backup")
    assert (third.step, third.segments_read, third.bytes_read) == (4, 0, 0)
    assert exact_step(tmp_path / "backup") == 4
    assert {path.name for path in tmp_path.iterdir()} == {"store", "backup"}


def test_files_that_vanish_while_they_are_copied_give_a_newer_state(run, tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "has_readers", lambda store: False)  # as from another machine
    backup(tmp_path / "store", tmp_path / "backup")
    save(run)
    copy_files, left = backup_module._copy_files, [3]

    def interrupted(source, filled, wanted):
        for each in wanted:
            if left[0]:
                left[0] -= 1
                save(run, "base")
                save(run, "base")
            copy_files(source, filled, [each])

    monkeypatch.setattr(backup_module, "_copy_files", interrupted)
    report = backup(tmp_path / "store", tmp_path / "backup")
    assert report.step == run.checkpointer.step_count == 10
    assert exact_step(tmp_path / "backup") == 10


def test_of_another_store_or_of_a_state_that_does_not_follow_no_backup_is_replaced(run, tmp_path):
    store, place = tmp_path / "store", tmp_path / "backup"
    backup(store, place)
    earlier = tmp_path / "earlier"
    shutil.copytree(store, earlier)
    save(run)
    clone = tmp_path / "clone"
    shutil.copytree(store, clone)
    backup(store, place)
    with pytest.raises(StoreError, match=r"holds step 4 of this store.*\(step 3\) does not follow"):
        backup(earlier, place)
    other = Run.at(clone)
    other.checkpointer.recover()
    save(other)
    other.release()
    save(run)
    backup(store, place)
    with pytest.raises(StoreError, match="holds step 5 of this store"):
        backup(clone, place)
    other = Run.at(tmp_path / "other")
    other.checkpointer.recover()
    save(other, "base")
    other.release()
    with pytest.raises(StoreError, match="of another store"):
        backup(tmp_path / "other", place)
    assert exact_step(place) == 5


def test_what_is_no_store_makes_no_backup(tmp_path):
    (tmp_path / "job").mkdir()
    with pytest.raises(StoreError, match=r"is not a cpr_ext store \(it has no STORE\.json\)"):
        backup(tmp_path / "job", tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def test_a_directory_in_use_or_with_other_files_is_refused(run, tmp_path):
    store, place = tmp_path / "store", tmp_path / "backup"
    with pytest.raises(UsageError, match="not apart"):
        backup(store, store / "backup")
    backup(store, place)
    other = Run.at(place)
    with pytest.raises(StoreError, match="is being written by"):
        backup(store, place)
    other.release()
    (place / "notes.txt").touch()
    with pytest.raises(StoreError, match=r"notes\.txt"):
        backup(store, place)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    with pytest.raises(StoreError, match=r"notes\.txt"):
        backup(store, tmp_path / "full")


def test_a_mount_point_is_filled_but_not_replaced(run, tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    (tmp_path / "mount" / "lost+found").mkdir(parents=True)
    backup(tmp_path / "store", tmp_path / "mount")
    with pytest.raises(StoreError, match="directory below it"):
        backup(tmp_path / "store", tmp_path / "mount")
    assert exact_step(tmp_path / "mount") == 3


def test_what_is_in_the_way_of_the_new_directory_is_not_removed(run, tmp_path):
    backup(tmp_path / "store", tmp_path / "backup")
    (tmp_path / "backup.filling").mkdir()
    (tmp_path / "backup.filling" / "notes.txt").touch()
    with pytest.raises(StoreError, match="in the way"):
        backup(tmp_path / "store", tmp_path / "backup")
    assert (tmp_path / "backup.filling" / "notes.txt").exists()


def test_a_damaged_store_replaces_no_backup(run, tmp_path):
    backup(tmp_path / "store", tmp_path / "backup")
    save(run)
    damaged = max((tmp_path / "store" / "shard-00001").glob("*.safetensors"))
    flip(damaged, damaged.stat().st_size - 1)
    with pytest.raises(DamageError, match="was not copied, as a file of it is damaged"):
        backup(tmp_path / "store", tmp_path / "backup")
    os.truncate(damaged, 1 << 40)  # a hole, of which nothing is copied
    with pytest.raises(DamageError, match="1099511627776 bytes, the manifest recorded"):
        backup(tmp_path / "store", tmp_path / "backup")
    assert exact_step(tmp_path / "backup") == 3
    assert {path.name for path in tmp_path.iterdir()} == {"store", "backup"}


CALLS = (
    *((filling, "write_checksummed"), (filling, "sync_directory"), (filling.os, "link")),
    *((backup_module, "create_anew"), (backup_module, "_check_copied")),
    *((replacing, "exchange"), (replacing, "sync_directory"), (replacing.shutil, "rmtree")),
)


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
def test_a_backup_that_ends_anywhere_leaves_the_old_state_or_the_new(
    run, tmp_path, monkeypatch, exchanges
):
    store, place = tmp_path / "store", tmp_path / "backup"
    backup(store, place)
    save(run)
    shutil.copytree(place, tmp_path / "old")
    calls = CALLS
    if not exchanges:
        monkeypatch.setattr(replacing, "_rename_exchange", _not_supported)
        calls += ((replacing.Path, "rename"),)
    steps, number = [], 0
    while True:
        is_whole = _backup_that_ends(calls, number, store, place)
        if not exchanges:
            replacing.put_back(place)
        steps.append(step_of(place))
        assert verify(place).is_sound
        if is_whole:
            break
        backup(store, place)
        assert exact_step(place) == 4
        assert not {path.name for path in tmp_path.iterdir()} - {"store", "backup", "old"}
        shutil.rmtree(place)
        shutil.copytree(tmp_path / "old", place)
        number += 1
    assert steps == sorted(steps)
    assert set(steps) == {3, 4}
    assert number > 10


def _not_supported(one, other):
    raise OSError(22, "Invalid argument")


def _backup_that_ends(calls, number, store, place):
    """Make a backup in a process that ends before call ``number``; True: it came to its end."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    left = [number]
    try:
        for owner, name in calls:
            setattr(owner, name, _ending(getattr(owner, name), left, name != "_check_copied"))
        backup(store, place)
        os._exit(0)
    finally:
        os._exit(2)


def _ending(call, left, is_called):
    def ending(*arguments, **named):
        if not left[0]:
            os._exit(1)
        left[0] -= 1
        return call(*arguments, **named) if is_called else None  # no native threads after a fork

    return ending


def test_a_backup_older_than_all_listed_ancestors_is_known_by_its_note(run, tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "ANCESTORS_KEPT", 3)
    store, place = tmp_path / "store", tmp_path / "backup"
    for directory in (place, tmp_path / "second"):
        backup(store, directory)
    for _ in range(6):
        save(run)
    assert len(list((store / "backups").iterdir())) == 2
    assert backup(store, place).step == 9
    assert len(list((store / "backups").iterdir())) == 2
    for _ in range(6):
        save(run)
    assert backup(store, place).step == backup(store, tmp_path / "second").step == 15
    shutil.rmtree(store / "backups")
    for _ in range(6):
        save(run)
    with pytest.raises(StoreError, match="does not follow"):
        backup(store, place)
    assert not (store / "backups").exists() or not list((store / "backups").iterdir())


@pytest.fixture
def objects(monkeypatch):
    """What ``memory:///job`` holds."""
    objects = Objects()
    for module in (opening, backup_module):
        monkeypatch.setattr(module, "open_objects", lambda options: objects)
    return objects


def at(directory, remote="memory:///job"):
    run = Run.at(directory, remote=remote)
    run.checkpointer.recover()
    return run


def copied(run):
    assert run.checkpointer._parts.remote.wait(60)
    run.checkpointer._parts.remote.close(60)
    run.release()


def test_a_backup_with_the_claim_that_a_reader_of_the_copy_has_may_hold_more(tmp_path, objects):
    run = at(tmp_path / "store")
    save(run, "base")
    copied(run)
    run = at(tmp_path / "store", remote=None)
    save(run)
    run.release()
    objects.states_left = 1  # that with the claim
    run = at(tmp_path / "store")
    backup(tmp_path / "store", tmp_path / "backup")
    run.checkpointer._parts.remote.close(1)
    run.release()
    objects.states_left = None
    copied(at(tmp_path / "reader"))
    with pytest.raises(StoreError, match=r"holds step 2 of this store.*\(step 1\) does not follow"):
        backup(tmp_path / "reader", tmp_path / "backup")
    assert exact_step(tmp_path / "backup") == 2


def test_a_fetch_brings_an_earlier_state_up_to_the_copy_and_fences_it(tmp_path, objects):
    run = at(tmp_path / "store")
    save(run, "base")
    shutil.copytree(tmp_path / "store", tmp_path / "earlier")
    save(run)
    copied(run)
    with pytest.raises(StoreError, match=r"earlier state.*cpr fetch memory:///job DIR"):
        Run.at(tmp_path / "earlier", remote="memory:///job")
    report = fetch("memory:///job", tmp_path / "earlier")
    assert (report.step_before, report.step, report.segments_read) == (1, 2, 3)
    assert fetch("memory:///job", tmp_path / "new").segments_read == 6
    run = at(tmp_path / "earlier")
    assert run.checkpointer.step_count == 2
    copied(run)
    for late in ("store", "new"):
        with pytest.raises(StoreError, match="an earlier state of the same job, of step 2"):
            Run.at(tmp_path / late, remote="memory:///job")


def test_the_commands(run, tmp_path):
    from click.testing import CliRunner

    from cpr_ext.cli.app import app

    cli = CliRunner()
    store, place = str(tmp_path / "store"), str(tmp_path / "backup")
    assert "step 3; 8 files of 8 read" in cli.invoke(app, ["backup", store, place]).output
    save(run)
    shown = json.loads(cli.invoke(app, ["backup", store, place, "--json"]).output)
    assert (shown["step_before"], shown["step"], shown["segments_read"]) == (3, 4, 3)
    address = f"file://{tmp_path}/remote"
    assert "no state yet" in str(cli.invoke(app, ["fetch", address, str(tmp_path / "x")]).exception)


def test_of_a_store_and_its_hard_links_both_may_be_trained(run, tmp_path):
    """As ``cp -al`` makes them while nothing is saved; the lock has to be one of its own."""
    shutil.copytree(tmp_path / "store", tmp_path / "links", copy_function=os.link)
    with pytest.raises(StoreError, match="is being written by"):
        Run.at(tmp_path / "links")
    for lock in (tmp_path / "links").rglob("LOCK"):
        lock.unlink()
    other = Run.at(tmp_path / "links")
    other.checkpointer.recover()
    for each in (other, run, run):
        save(each)
    other.release()
    run.release()
    assert exact_step(tmp_path / "links") == 4
    assert exact_step(tmp_path / "store") == 5
