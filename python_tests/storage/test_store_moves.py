"""Directories that move, are replaced, or have names that are no text."""

import shutil

import pytest
import torch

import cpr_ext
from cpr_ext._native import native
from cpr_ext.errors import SnapshotError, StorageError, StoreError
from cpr_ext.state.table import Table
from cpr_ext.storage.store import Store
from cpr_ext.storage.store_reader import StoreReader
from python_tests.helpers import Trained, assert_same, run_python


def test_a_relative_path_stays_where_it_was_though_the_working_directory_changes(
    tmp_path, monkeypatch
):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "there")
    other = Trained("store")  # a stranger's, of the same relative name
    other.train(1)
    other.checkpointer.close()
    files = {path: path.read_bytes() for path in (tmp_path / "there").rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path / "here")
    run = Trained("store", num_shards=2)
    monkeypatch.chdir(tmp_path / "there")
    run.train(3)
    run.save("base")
    assert run.checkpointer.recover(shards=[1]).rows_restored > 0
    rows = run.rows()
    run.checkpointer.close()
    assert {p: p.read_bytes() for p in (tmp_path / "there").rglob("*") if p.is_file()} == files
    monkeypatch.chdir(tmp_path / "here")
    again = Trained("store", seed=3, num_shards=2)
    assert again.checkpointer.recover().step == 3
    assert_same(again.rows(), rows)
    again.checkpointer.close()


def move(store):
    store.rename(store.with_name("moved"))


def remove(store):
    for _ in range(20):  # a thread of the writer may make a file meanwhile
        shutil.rmtree(store, ignore_errors=True)
        if not store.exists():
            return
    raise AssertionError("it is still there")


def replace(store):
    move(store)
    other = Trained(store)
    other.train(1)
    other.checkpointer.save("base")
    other.checkpointer.close()


def remove_lock(store):
    (store / "LOCK").unlink()


@pytest.mark.parametrize("change", [move, remove, replace, remove_lock])
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_store_that_is_not_where_it_was_is_noticed_before_a_commit(tmp_path, change, is_begun):
    store = tmp_path / "store"
    run = Trained(store, schedule=cpr_ext.EverySteps(100))
    run.train(2)
    run.checkpointer.wait()
    if is_begun:  # a segment of the next snapshot is in the directory that goes
        run.checkpointer._saver.begin("partial")
        run.checkpointer._saver.in_flight.capture_rows(2, max_bytes=1, wait_for_slot=True)
    change(store)
    found = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    if not is_begun:
        run.checkpointer.save()
    with pytest.raises(SnapshotError) as failure:
        run.checkpointer.wait()
    cause = failure.value.__cause__
    # A file may be missed before the directory is.
    assert isinstance(cause, StoreError | StorageError)
    if not is_begun:
        assert "was moved, removed or replaced after this process had opened it" in str(cause)
    with pytest.raises(StoreError, match="was moved, removed or replaced"):
        run.checkpointer.recover(shards=[0])
    with pytest.warns(cpr_ext.errors.SnapshotFailedWarning, match="training continues"):
        run.train(101)
    after = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    if change is remove_lock:  # what was begun may be there, but nothing names it
        after, found = (
            {p: d for p, d in x.items() if p.name[:8] != "00000002"} for x in (after, found)
        )
    assert after == found
    with pytest.raises(SnapshotError):
        run.checkpointer.close()
    if change is replace:  # two writers would have mixed their snapshots
        other = Trained(store)
        assert other.checkpointer.recover().step == 1
        other.checkpointer.close()
    if change is move:
        assert StoreReader(tmp_path / "moved").manifest.dense[-1].last_step == 1


def test_a_segment_given_up_does_not_take_a_file_of_the_same_name_with_it(tmp_path):
    """Its directory was replaced meanwhile, and the file is another store's."""
    place = tmp_path / "store"
    place.mkdir()
    pipeline = native.SnapshotPipeline(num_slots=2, slot_bytes=4096)
    table = native.SegmentTable(name="a", num_rows=4)
    weight = torch.ones(4, 4)
    table.add_rows("weight", weight, 4096)
    path = place / "00000001-base.safetensors"
    job = pipeline.start(path=path, header_bytes=4096, file_bytes=8192, tables=[table])
    job.capture(step=1, wait_for_slot=True)
    assert job.wait("written", 20)
    place.rename(tmp_path / "moved")
    place.mkdir()
    path.write_text("another's")
    job.cancel("the directory was replaced")
    del job
    assert path.read_text() == "another's"


def test_the_store_opens_where_the_path_leads_now_after_a_move(tmp_path):
    tables = [Table("a", torch.zeros(3, 2))]
    old = Store(tmp_path / "store", tables=tables)
    old.directory.rename(tmp_path / "moved")
    new = Store(tmp_path / "store", tables=tables)  # not the same: no refusal
    with pytest.raises(StoreError, match="is being written by this same process"):
        Store(tmp_path / "moved", tables=tables)
    new.close()
    old.close()


# --- names ---


CONVERSIONS = [
    "pipeline.start(path=3, header_bytes=4096, file_bytes=8192, tables=[])",
    "pipeline.start(path='/\\ud800', header_bytes=4096, file_bytes=8192, tables=[])",
    "pipeline.start(path='/a\\0b', header_bytes=4096, file_bytes=8192, tables=[])",
    "pipeline.start(path='/x', header_bytes=4096, file_bytes=8192, tables=[3])",
    "native.SnapshotPipeline.start(None, path='', header_bytes=1, file_bytes=1, tables=[])",
    "native.RestoreSource(path=b'/x', tables=[3], wanted=[], chunks=[])",
]


def test_arguments_that_cannot_be_converted_raise_and_do_not_crash():
    code = """
from cpr_ext._native import native
pipeline = native.SnapshotPipeline(num_slots=2, slot_bytes=65536)
for call in sys.argv[1:]:
    try:
        eval(call)
    except TypeError:
        print("refused")
"""
    assert run_python(code, *CONVERSIONS) == "refused\n" * len(CONVERSIONS)
