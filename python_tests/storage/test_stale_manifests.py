"""A manifest that was removed, swapped or replaced by an older copy: its neighbours tell."""

import shutil
import threading

import pytest

import cpr_ext
from cpr_ext.errors import DamageError, StorageError
from cpr_ext.storage.file_names import MANIFEST_FILE
from cpr_ext.storage.manifest import Manifest
from cpr_ext.storage.stale_manifests import find_outdated
from cpr_ext.storage.store import Store
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.tools.maintenance import compact, inspect, verify
from python_tests.helpers import Trained
from python_tests.storage.test_store import open_store, record
from python_tests.tools.maintenance.stores import recovered, trained_store

DIRECTORIES = ["dense", "shard-00000", "shard-00001"]


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """A store after four snapshots, and every version that each of its manifests had."""
    place = tmp_path_factory.mktemp("history") / "store"
    versions = {name: [] for name in DIRECTORIES}
    commit = Manifest.commit

    def keep(self, segments, seen=None):
        commit(self, segments, seen)
        versions[self.directory.name].append((self.directory / MANIFEST_FILE).read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manifest, "commit", keep)
        trained_store(place, num_shards=2, snapshots=3).checkpointer.close()
    return place, versions


def copy(place, tmp_path):
    return shutil.copytree(place, tmp_path / "store")


def assert_refused(store, name, witness=None):
    files = {p: p.read_bytes() for p in store.rglob("*") if p.is_file() and p.name != "LOCK"}
    for open_it in (lambda: recovered(store, num_shards=2), lambda: StoreReader(store)):
        with pytest.raises(DamageError, match="Put the newer one back") as refusal:
            open_it()
        assert str(store / name / MANIFEST_FILE) in str(refusal.value)
        assert witness is None or str(store / witness / MANIFEST_FILE) in str(refusal.value)
    assert str(store / name / MANIFEST_FILE) in [d.path for d in verify(store).damaged]
    after = {p: p.read_bytes() for p in store.rglob("*") if p.is_file() and p.name != "LOCK"}
    assert after == files, "what is refused is left as it is"


def test_every_commit_is_counted_and_every_one_but_the_last_is_witnessed(history):
    place, versions = history
    manifests = [Manifest(place / name) for name in DIRECTORIES]
    assert [m.generation for m in manifests] == [len(versions[name]) for name in DIRECTORIES]
    assert min(m.generation for m in manifests) > 4
    seen = {name: max(m.seen.get(name, 0) for m in manifests) for name in DIRECTORIES}
    behind = {m.directory.name: m.generation - seen[m.directory.name] for m in manifests}
    assert behind == {"dense": 1, "shard-00000": 0, "shard-00001": 0}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_an_older_copy_is_refused_with_its_name_and_its_witness(history, tmp_path, name):
    place, versions = history
    store = copy(place, tmp_path)
    unwitnessed = 2 if name == "dense" else 1
    for version in versions[name][:-unwitnessed]:
        (store / name / MANIFEST_FILE).write_bytes(version)
        assert_refused(store, name, None if name == "dense" else "dense")
    (store / name / MANIFEST_FILE).write_bytes(versions[name][-1])
    recovered(store, num_shards=2)


def test_the_last_commit_of_a_store_has_no_witness_and_undoing_it_gives_the_snapshot_before(
    history, tmp_path
):
    """What docs/consistency.md does not promise: a state that a crash could have left as well."""
    place, versions = history
    store = copy(place, tmp_path)
    (store / "dense" / MANIFEST_FILE).write_bytes(versions["dense"][-2])
    assert find_outdated([Manifest(store / name) for name in DIRECTORIES]) == []


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_removed_manifest_is_refused_and_no_segment_is_taken_for_a_left_over(
    history, tmp_path, name
):
    store = copy(history[0], tmp_path)
    (store / name / MANIFEST_FILE).unlink()
    assert_refused(store, name)
    with pytest.raises(DamageError, match="is missing, but"):
        StoreReader(store)


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_removed_directory_is_refused(history, tmp_path, name):
    store = copy(history[0], tmp_path)
    shutil.rmtree(store / name)
    for look in (StoreReader, inspect, lambda store: recovered(store, num_shards=2)):
        with pytest.raises(DamageError, match=name):
            look(store)
        shutil.rmtree(store / name, ignore_errors=True)
    assert not verify(store).is_sound


def test_a_manifest_removed_after_the_first_snapshot_is_noticed_too(tmp_path):
    run = Trained(tmp_path, num_shards=2)
    run.train(1)
    run.checkpointer.close()
    for name in DIRECTORIES:
        path = tmp_path / name / MANIFEST_FILE
        path.rename(tmp_path / "aside")
        with pytest.raises(DamageError, match=name):
            Trained(tmp_path, num_shards=2)
        (tmp_path / "aside").rename(path)
    again = Trained(tmp_path, num_shards=2)
    assert again.checkpointer.recover().step == 1
    again.checkpointer.close()


def test_a_manifest_of_another_directory_is_refused(history, tmp_path):
    store = copy(history[0], tmp_path)
    one, other = (store / name / MANIFEST_FILE for name in DIRECTORIES[1:])
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    for open_it in (lambda: recovered(store, num_shards=2), lambda: StoreReader(store)):
        with pytest.raises(DamageError, match="it is the manifest of 'shard-0000"):
            open_it()
    assert len(verify(store).damaged) == 2


def test_a_generation_is_seen_only_once_it_is_durable(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    store.add_to_shard(0, record(1))
    before = store.shards[0].generation

    def refuse(*_):
        raise StorageError(28, "No space left on device")

    # The last thing a commit does is to sync the directory: it may be on the disk, or not.
    with monkeypatch.context() as patch:
        patch.setattr("cpr_ext.storage.checksummed_json.sync_directory", refuse)
        with pytest.raises(StorageError):
            store.add_to_shard(0, record(2, "partial"))
    store.add_to_shard(1, record(2, "partial"))
    assert store.shards[1].seen["shard-00000"] == before
    store.add_to_shard(0, record(3, "partial"))
    assert store.shards[0].generation == before + 2, "the number of the failed one is not reused"
    store.close()
    open_store(tmp_path).close()


def test_rolling_back_retaining_and_compacting_leave_a_store_that_opens(tmp_path):
    run = trained_store(
        tmp_path, num_shards=2, compaction=cpr_ext.CompactionOptions(after=0.1), rebase_after=None
    )
    run.checkpointer._saver.outcomes._compactor.wait()
    run.train(1)
    run.checkpointer.recover(shards=[1])
    run.checkpointer.recover(mode="full")
    for _ in range(2):
        run.train(1)
        run.checkpointer.save()
    run.checkpointer.close()
    assert compact(tmp_path).shards_compacted == 2
    assert verify(tmp_path).is_sound
    recovered(tmp_path, num_shards=2)
    versions = [Manifest(tmp_path / name) for name in DIRECTORIES]
    assert all(len(manifest.seen) == 2 for manifest in versions)


def test_a_reader_beside_a_busy_writer_sees_no_outdated_manifest(tmp_path):
    run = Trained(tmp_path, num_shards=2, schedule=cpr_ext.EverySteps(1), when_busy="wait")
    run.train(1)
    run.checkpointer.wait()
    stop, errors, looks = threading.Event(), [], [0]

    def look():
        while not stop.is_set():
            try:
                reader = StoreReader(tmp_path)
                assert reader.dense.segments
                assert not [d for d in verify(tmp_path).damaged if "generation" in d.reason]
                looks[0] += 1
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=look)
    thread.start()
    run.train(40)
    stop.set()
    thread.join()
    run.checkpointer.close()
    assert errors == []
    assert looks[0] > 3


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_commit_between_two_readings_is_waited_out(tmp_path, monkeypatch, name):
    """Whichever manifest was read too early, the reader looks again instead of refusing."""
    store: Store = open_store(tmp_path)
    store.add_to_shard(0, record(1))
    store.add_to_shard(1, record(1))
    store.add_dense(record(1, "dense", shards=[shard.chain for shard in store.shards]))
    order = [store.shards[0], store.shards[1], store.dense]
    order = order[[m.directory.name for m in order].index(name) :]
    reads, init = [], Manifest.__init__

    def read_then_commit(self, directory, *more, **options):
        init(self, directory, *more, **options)
        reads.append(directory.name)
        if reads.count(name) == 1 and directory.name == name:
            reads.append("committed")
            for manifest in order:
                number = manifest.segments[-1].snapshot + 1
                kind = "dense" if manifest is store.dense else "partial"
                shards = [shard.chain for shard in store.shards] if kind == "dense" else []
                new = record(number, kind, shards=shards)
                store._commit(manifest, (*manifest.segments, new))

    monkeypatch.setattr(Manifest, "__init__", read_then_commit)
    reader = StoreReader(tmp_path)
    assert reads.count("dense") >= 3, "it looked again"
    assert find_outdated([reader.dense, *reader.shards]) == []
    store.close()
