"""The store directory: whose it is, what is in it, and what is durable."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

import cpr_ext
from cpr_ext.errors import DamageError, StorageError, StoreError
from cpr_ext.state.table import Table
from cpr_ext.storage.file_names import MANIFEST_FILE
from cpr_ext.storage.manifest import Manifest
from cpr_ext.storage.store import Store
from python_tests.helpers import Trained, run_python
from python_tests.storage.records import record


def tables(**shapes):
    return [Table(name, torch.zeros(shape)) for name, shape in shapes.items()]


def open_store(directory, *, num_shards=2, **shapes):
    return Store(directory, tables=tables(**(shapes or {"a": (10, 2)})), num_shards=num_shards)


# --- whose directory it is ---


def test_a_directory_with_other_files_is_not_a_store_and_stays_as_it_is(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(
        StoreError, match=r"not a cpr_ext store .* holds 'thesis.tex'; choose an em"
    ):
        open_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_where_the_store_should_be_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StorageError, match="file") as refusal:
            open_store(place)
        assert isinstance(refusal.value, OSError)
        assert refusal.value.errno


def test_an_interrupted_first_open_does_not_block_the_next(tmp_path):
    (tmp_path / "STORE.json.tmp").write_text("half")
    open_store(tmp_path).close()
    open_store(tmp_path).close()


@pytest.mark.parametrize(
    ("shapes", "num_shards", "differences"),
    [
        ({"a": (10, 2)}, 3, ["it has 2 shards, not 3"]),
        ({"a": (11, 2)}, 2, ["table 'a' has num_embeddings 10, the model 11"]),
        (
            {"b": (10, 4)},
            2,
            ["table 'a' is not in the model", "table 'b' is not in the store"],
        ),
        (
            {"a": (9, 3)},
            1,
            [
                "it has 2 shards, not 1",
                "table 'a' has embedding_dim 2, the model 3",
                "table 'a' has num_embeddings 10, the model 9",
            ],
        ),
    ],
)
def test_another_model_is_refused_with_every_difference(tmp_path, shapes, num_shards, differences):
    open_store(tmp_path).close()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match="holds another model") as refusal:
        open_store(tmp_path, num_shards=num_shards, **shapes)
    assert "; ".join(differences) in str(refusal.value)
    assert "Choose another directory" in str(refusal.value)
    assert sorted(tmp_path.rglob("*")) == before
    open_store(tmp_path).close()


def test_another_dtype_is_another_model(tmp_path):
    open_store(tmp_path).close()
    half = [Table("a", torch.zeros(10, 2, dtype=torch.float16))]
    with pytest.raises(StoreError, match="dtype F32, the model F16"):
        Store(tmp_path, tables=half, num_shards=2)


def test_a_store_in_use_by_another_process_is_refused_with_its_pid(tmp_path):
    store = open_store(tmp_path)
    told = run_python(
        "import sys, torch\n"
        "from cpr_ext.errors import StoreError\n"
        "from cpr_ext.storage.store import Store\n"
        "from cpr_ext.state.table import Table\n"
        "try:\n"
        "    Store(sys.argv[1], tables=[Table('a', torch.zeros(10, 2))], num_shards=2)\n"
        "except StoreError as error:\n"
        "    print(error)\n",
        tmp_path,
    )
    assert f"is being written by process {os.getpid()}; end it" in told
    store.close()
    open_store(tmp_path).close()


def test_a_refused_store_leaves_no_lock_behind(tmp_path):
    open_store(tmp_path).close()
    (tmp_path / "shard-00001" / MANIFEST_FILE).write_text("garbage")
    with pytest.raises(DamageError):
        open_store(tmp_path)
    (tmp_path / "shard-00001" / MANIFEST_FILE).unlink()
    open_store(tmp_path).close()


# --- what a crash leaves ---


def test_left_over_temporary_files_and_unlisted_segments_are_removed_at_open(tmp_path):
    run = Trained(tmp_path, num_shards=2)
    run.train(1)
    run.checkpointer.close()
    listed = sorted(tmp_path.rglob("*.safetensors"))
    for directory in ("dense", "shard-00000", "shard-00001"):
        (tmp_path / directory / "00000077-partial.safetensors").write_text("half")
        (tmp_path / directory / (MANIFEST_FILE + ".tmp")).write_text("half")
        (tmp_path / directory / "notes.txt").write_text("mine")
    again = Trained(tmp_path, num_shards=2)
    assert sorted(tmp_path.rglob("*.safetensors")) == listed
    assert not list(tmp_path.rglob("*.tmp"))
    assert len(list(tmp_path.rglob("notes.txt"))) == 3, "strangers' files are not ours to remove"
    again.checkpointer.recover()
    again.checkpointer.close()


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
        (tmp_path / "shard-00000" / name).write_text("half")
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


def test_the_number_of_a_snapshot_is_never_used_twice_for_a_listed_segment(tmp_path):
    run = Trained(tmp_path, schedule=cpr_ext.EverySteps(1), when_busy="wait")
    run.train(3)
    run.checkpointer.close()
    last = run.store.last_snapshot
    again = Trained(tmp_path)
    again.checkpointer.recover()
    assert again.checkpointer.save().number == last + 1
    again.checkpointer.close()


# --- durability ---


class Journal:
    """What the operating system was asked for, in order, by path."""

    def __init__(self, monkeypatch):
        self.events = []
        fsync, rename, unlink, mkdir = os.fsync, Path.replace, Path.unlink, Path.mkdir

        def note_fsync(descriptor):
            fsync(descriptor)
            self.events.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink()))

        def note_rename(path, target):
            result = rename(path, target)
            self.events.append(("rename", Path(target)))
            return result

        def note_unlink(path, missing_ok=False):
            unlink(path, missing_ok=missing_ok)
            self.events.append(("unlink", path))

        def note_mkdir(path, *args, **kwargs):
            if not path.exists():
                self.events.append(("mkdir", path))
            mkdir(path, *args, **kwargs)

        monkeypatch.setattr(Path, "mkdir", note_mkdir)
        monkeypatch.setattr(os, "fsync", note_fsync)
        monkeypatch.setattr(Path, "replace", note_rename)
        monkeypatch.setattr(Path, "unlink", note_unlink)

    def index(self, *event, after=-1):
        return self.events.index(event, after + 1)


def test_a_commit_syncs_data_then_renames_then_syncs_the_directory_then_removes(
    tmp_path, monkeypatch
):
    manifest = Manifest(tmp_path)
    (tmp_path / record(1).file).write_text("rows")
    manifest.commit((record(1),))
    journal = Journal(monkeypatch)
    manifest.commit((record(2),))
    path = tmp_path / MANIFEST_FILE
    names = journal.index("sync", tmp_path)
    data = journal.index("sync", path.with_name(path.name + ".tmp"), after=names)
    renamed = journal.index("rename", path, after=data)
    directory = journal.index("sync", tmp_path, after=renamed)
    journal.index("unlink", tmp_path / record(1).file, after=directory)


def test_every_directory_on_the_way_to_a_new_store_is_durable_once_it_is_open(
    tmp_path, monkeypatch
):
    """Else a power cut could lose the entry of a directory, and all that was committed in it."""
    journal = Journal(monkeypatch)
    place = tmp_path / "runs" / "a" / "store"
    open_store(place).close()
    made = {path: i for i, (what, path) in enumerate(journal.events) if what == "mkdir"}
    assert {
        place.parent.parent,
        place.parent,
        place,
        place / "dense",
        place / "shard-00001",
    } <= set(made)
    for path, position in made.items():
        assert ("sync", path.parent) in journal.events[position:], path


def test_a_newer_full_recovery_point_replaces_the_older_and_others_keep_it(tmp_path):
    store = open_store(tmp_path)
    points = [record(n, "dense", is_complete=n in (1, 4)) for n in range(1, 6)]
    kept = []
    for one in points:
        store.add_dense(one)
        kept.append([r.snapshot for r in store.dense.segments])
    assert kept == [[1], [1, 2], [1, 3], [4], [4, 5]]
    store.close()


def test_retaining_and_rolling_back_keep_what_is_needed(tmp_path):
    store = open_store(tmp_path)
    for n in range(1, 5):
        store.add_to_shard(0, record(n, "base" if n == 2 else "partial"))
    store.add_to_shard(1, record(3, "partial"))
    store.add_dense(record(2, "dense", is_complete=True))
    store.add_dense(record(4, "dense"))
    assert store.last_snapshot == 4
    store.roll_back(3)
    assert [[r.snapshot for r in m.segments] for m in [*store.shards, store.dense]] == [
        [1, 2, 3],
        [3],
        [2],
    ]
    store.retain()
    assert [[r.snapshot for r in m.segments] for m in [*store.shards, store.dense]] == [
        [2, 3],
        [3],
        [2],
    ]
    store.roll_back(0)
    assert store.is_empty
    assert store.last_snapshot == 0
    store.close()


def test_a_store_can_be_copied_elsewhere(tmp_path):
    run = Trained(tmp_path / "here")
    run.train(2)
    run.checkpointer.save("base")
    run.checkpointer.close()
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    again = Trained(tmp_path / "there", seed=4)
    assert again.checkpointer.recover().step == 2
    again.checkpointer.close()
