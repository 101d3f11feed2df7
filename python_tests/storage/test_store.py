"""The store directory: whose it is, what is in it, and what is durable."""

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.errors import DamageError, StoreError
from cpr_ext.state.table import Table
from cpr_ext.storage.file_names import (
    MANIFEST_FILE,
    PREVIOUS_FILE,
    parse_segment_name,
    segment_name,
)
from cpr_ext.storage.store import Store
from python_tests.helpers import Trained
from python_tests.storage.records import record


def tables(**shapes):
    return [Table(name, torch.zeros(shape)) for name, shape in shapes.items()]


def open_store(directory, **shapes):
    return Store(directory, tables=tables(**(shapes or {"a": (10, 2)})))


def add(store, snapshot, kind="base", is_complete=False):
    """Commit a snapshot, of which no file is looked at; ``kind`` None: it has no rows."""
    rows = None if kind is None else record(snapshot, kind)
    store.add(record(snapshot, "dense", is_complete=is_complete), rows)


def snapshots(store):
    """The numbers of the snapshots that the manifest names: dense parts, rows."""
    manifest = store.manifest
    return tuple([r.snapshot for r in records] for records in (manifest.dense, manifest.rows))


# --- whose directory it is ---


def test_a_directory_with_other_files_is_not_a_store_and_stays_as_it_is(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(
        StoreError, match=r"not a cpr_ext store .* holds 'thesis.tex'; choose an em"
    ):
        open_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("shapes", "differences"),
    [
        ({"a": (11, 2)}, "table 'a' has num_embeddings 10, the model 11"),
        ({"b": (10, 4)}, "table 'a' is not in the model; table 'b' is not in the store"),
        ({"a": (9, 3)}, "embedding_dim 2, the model 3; table 'a' has num_embeddings 10, the mo"),
    ],
)
def test_another_model_is_refused_with_every_difference(tmp_path, shapes, differences):
    open_store(tmp_path).close()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match="holds another model") as refusal:
        open_store(tmp_path, **shapes)
    assert differences in str(refusal.value)
    assert "Choose another directory" in str(refusal.value)
    assert sorted(tmp_path.rglob("*")) == before
    half = [Table("a", torch.zeros(10, 2, dtype=torch.float16))]
    with pytest.raises(StoreError, match="dtype F32, the model F16"):
        Store(tmp_path, tables=half)


def test_a_store_without_its_manifest_is_no_new_store(tmp_path):
    run = Trained(tmp_path)
    run.train(1)
    run.checkpointer.close()
    (tmp_path / MANIFEST_FILE).unlink()
    for _ in range(2):
        with pytest.raises(DamageError, match=r"MANIFEST.json is missing. `cpr repair`"):
            Trained(tmp_path)
        (tmp_path / PREVIOUS_FILE).unlink(missing_ok=True)  # the segments are enough


# --- what a crash leaves ---


@pytest.mark.parametrize("code", [errno.EPERM, errno.EIO])
def test_a_left_over_file_that_cannot_be_removed_costs_a_warning(
    tmp_path, monkeypatch, caplog, code
):
    run = Trained(tmp_path)
    run.train(2)
    run.checkpointer.save("base")
    run.checkpointer.close()
    stuck = ["00000003-partial.safetensors", "00000007-base.safetensors"]
    for name in stuck:
        (tmp_path / "segments" / name).write_text("half")
    unlink = Path.unlink

    def refuse(path, missing_ok=False):
        if path.name in stuck:
            raise OSError(code, os.strerror(code), str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    again = Trained(tmp_path, seed=1)
    assert again.checkpointer.recover().step == 2
    for name in stuck:
        assert f"cannot be removed: [Errno {code}]" in caplog.text
        assert name in caplog.text
    again.train(1)
    assert again.checkpointer.save("base").number > 7, "its number is another's file"
    again.checkpointer.close()


# --- durability ---


def journal(monkeypatch):
    """What the operating system is asked for from now on, in order, by path."""
    events = []

    def note(place, name, event_of):
        real = getattr(place, name)

        def call(*given, **options):
            event = event_of(*given)
            result = real(*given, **options)
            events.append(event)
            return result

        monkeypatch.setattr(place, name, call)

    note(os, "fsync", lambda descriptor: ("sync", Path(f"/proc/self/fd/{descriptor}").readlink()))
    note(Path, "replace", lambda _, target: ("rename", Path(target)))
    note(Path, "unlink", lambda path, *_: ("unlink", path))
    note(Path, "mkdir", lambda path, *_: ("was there" if path.exists() else "mkdir", path))
    return events


def test_every_directory_on_the_way_to_a_new_store_is_durable_once_it_is_open(
    tmp_path, monkeypatch
):
    """Else a power cut could lose the entry of a directory, and all that was committed in it."""
    events = journal(monkeypatch)
    place = tmp_path / "runs" / "a" / "store"
    open_store(place).close()
    made = {path: i for i, (what, path) in enumerate(events) if what == "mkdir"}
    assert {place.parent.parent, place.parent, place, place / "segments"} <= set(made)
    for path, position in made.items():
        assert ("sync", path.parent) in events[position:], path
    # A manifest without its segments is damage.
    durable = events.index(("sync", place), made[place / "segments"])
    assert durable < events.index(("rename", place / MANIFEST_FILE))


def test_retaining_and_rolling_back_keep_what_is_needed(tmp_path):
    store = open_store(tmp_path)
    add(store, 1)
    add(store, 2, is_complete=True)
    add(store, 3, "partial")
    add(store, 4, None)
    assert snapshots(store) == ([2, 4], [2, 3])
    store.roll_back(3)
    assert snapshots(store) == ([2], [2, 3])
    add(store, 5, "partial")
    assert snapshots(store) == ([2, 5], [2, 3, 5])
    store.release_history()
    assert snapshots(store) == ([5], [2, 3, 5])
    store.roll_back(0)
    assert store.is_empty
    assert snapshots(store) == ([], [])
    store.close()


# --- the names of its files ---


@given(snapshot=st.integers(0, 10**12), kind=st.sampled_from(["base", "partial", "dense"]))
def test_a_segments_name_is_read_back(snapshot, kind):
    assert parse_segment_name(segment_name(snapshot, kind)) == (snapshot, kind)


@pytest.mark.parametrize(
    "name",
    [
        *("", "00000001-base", "1-base.safetensors", "MANIFEST.json"),
        *("00000001-other.safetensors", "00000001-00000-base.safetensors"),
        *("000000001-base.safetensors", "00000001-base.safetensors.tmp"),
        *("x00000001-dense.safetensors", "../00000001-dense.safetensors"),
        *("00000001-dense.safetensors\n", "0000000\u0661-dense.safetensors"),
    ],
)
def test_no_other_name_is_a_segment(name):
    assert parse_segment_name(name) is None
