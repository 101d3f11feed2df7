"""What `fetch` makes is a committed state, whenever it ends."""

import json
import os
import shutil

import pytest
from click.testing import CliRunner

import cpr_ext
from cpr_ext.errors import StoreError
from cpr_ext.wings.cli.app import app
from cpr_ext.wings.remote import RemoteOptions, fetching
from cpr_ext.wings.tools.maintenance import fetch, verify
from python_tests.faults.mixtures import Run


@pytest.fixture
def copy(tmp_path):
    """The address of the copy of a run of three snapshots."""
    train(tmp_path / "store", ("base", "partial", "partial"))
    return address_of(tmp_path / "store")


def address_of(store):
    return f"file://{store}.copy"


def copied_to(address):
    return cpr_ext.StoreOptions(None, cpr_ext.Retention(2), remote=RemoteOptions(address))


def train(store, kinds=("partial",)):
    """Resume a run, save so often, and copy it."""
    run = Run.at(store, store=copied_to(address_of(store)))
    run.checkpointer.recover()
    for kind in kinds:
        run.train()
        run.save(kind)
    assert run.checkpointer.store.origin.wait(60)
    run.checkpointer.store.origin.close(60)
    run.release()


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


def test_the_copy_becomes_a_store_in_a_new_directory_and_in_no_other(copy, tmp_path):
    report = fetch(copy, tmp_path / "new")
    assert (report.step, report.segments) == (3, 5)
    assert exact_step(tmp_path / "new") == 3
    (tmp_path / "mount" / "lost+found").mkdir(parents=True)  # of a file system
    fetch(copy, tmp_path / "mount")
    assert exact_step(tmp_path / "mount") == 3
    with pytest.raises(StoreError, match="empty or a new"):
        fetch(copy, tmp_path / "new")
    for name in ("notes.txt", "segments"):
        (tmp_path / f"full {name}" / name).mkdir(parents=True)
        with pytest.raises(StoreError, match=name):
            fetch(copy, tmp_path / f"full {name}")
        assert (tmp_path / f"full {name}" / name).exists()
    run = CliRunner().invoke
    assert "step 3; 5 files read" in run(app, ["fetch", copy, str(tmp_path / "a")]).output
    shown = json.loads(run(app, ["fetch", copy, str(tmp_path / "b"), "--json"]).output)
    assert (shown["step"], shown["segments"]) == (3, 5)
    nothing = run(app, ["fetch", f"file://{tmp_path}/none", str(tmp_path / "x")])
    assert "no state yet" in str(nothing.exception)


def test_the_store_of_a_machine_that_came_back_is_refused_and_the_fetched_one_goes_on(
    copy, tmp_path
):
    shutil.copytree(tmp_path / "store", tmp_path / "earlier")
    train(tmp_path / "store")
    with pytest.raises(StoreError, match=r"earlier state.*cpr fetch file://.* DIR"):
        Run.at(tmp_path / "earlier", store=copied_to(copy))
    fetch(copy, tmp_path / "new")
    run = Run.at(tmp_path / "new", store=copied_to(copy))
    run.checkpointer.recover()
    run.train()
    run.save("partial")
    assert run.checkpointer.store.origin.wait(60)
    run.release()
    with pytest.raises(StoreError, match="an earlier state of the same job, of step 4"):
        Run.at(tmp_path / "store", store=copied_to(copy))


CALLS = (
    *((fetching, "write_checksummed"), (fetching, "sync_directory"), (fetching, "read_objects")),
    *((fetching, "_keep_time"), (fetching.Path, "replace")),
)


def test_a_fetch_that_ends_anywhere_is_no_store_and_can_be_done_again(copy, tmp_path):
    place, number, is_whole = tmp_path / "new", 0, False
    while not is_whole:
        is_whole = _fetch_that_ends(CALLS, number, copy, place)
        if is_store := (place / "MANIFEST.json").exists():
            assert verify(place).is_sound
        else:
            fetch(copy, place)
        assert is_store or not is_whole
        assert exact_step(place) == 3
        shutil.rmtree(place)
        number += 1
    assert number > 5


def _fetch_that_ends(calls, number, copy, place):
    """Fetch in a process that ends before call ``number``; True: it came to its end."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    left = [number]
    try:
        for owner, name in calls:
            setattr(owner, name, _ending(getattr(owner, name), left))
        fetch(copy, place)
        os._exit(0)
    finally:
        os._exit(2)


def _ending(call, left):
    def ending(*arguments, **named):
        if not left[0]:
            os._exit(1)
        left[0] -= 1
        return call(*arguments, **named)

    return ending
