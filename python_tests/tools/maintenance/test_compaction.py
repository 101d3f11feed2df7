import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from cpr_ext.errors import DamageError, StoreError, UsageError
from cpr_ext.storage.merge import MergeLimits
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.tools.maintenance import compact, compaction, verify
from python_tests.helpers import assert_same, flip
from python_tests.tools.maintenance.stores import recovered, trained_store

SMALL = MergeLimits(block_bytes=1 << 14, chunk_bytes=1 << 13)


def kinds(directory):
    return [
        [record.kind for record in manifest.segments] for manifest in StoreReader(directory).shards
    ]


@pytest.fixture
def store(tmp_path):
    trained = trained_store(tmp_path / "store")
    trained.checkpointer.close()
    return tmp_path / "store"


def without_full_recovery_points(directory):
    """A store whose only recovery point is its newest snapshot: captured over several steps."""
    trained = trained_store(directory, consistency="row")
    dense = trained.store.dense
    dense.commit(tuple(r for r in dense.segments[-1:]))
    trained.checkpointer.close()
    return directory


@pytest.mark.parametrize("limits", [None, SMALL], ids=["one block", "many blocks"])
def test_recovery_after_compaction_gives_the_same_rows_bit_for_bit(tmp_path, limits):
    store = without_full_recovery_points(tmp_path / "store")
    before = recovered(store)
    report = compact(store, limits=limits)
    after = recovered(store)
    assert report.shards_compacted == 3
    assert (report.segments_before, report.segments_after) == (15, 3)
    assert kinds(store) == [["base"]] * 3
    assert_same(before[1], after[1])
    assert_same(before[2], after[2])
    assert after[0].segments_read < before[0].segments_read
    assert verify(store).is_sound


def test_a_full_recovery_point_stays_reachable(store):
    reader = StoreReader(store)
    assert [r.is_complete for r in reader.dense.segments] == [True, False]
    copy = store.with_name("copy")
    shutil.copytree(store, copy)
    compact(store)
    assert kinds(store) == [["base", "merged"]] * 3
    for mode in ("partial", "full"):
        for directory in (store, copy):
            target = directory.with_name(f"{directory.name}-{mode}")
            shutil.copytree(directory, target)
        old = recovered(copy.with_name(f"copy-{mode}"), mode=mode)
        new = recovered(store.with_name(f"store-{mode}"), mode=mode)
        assert_same(old[1], new[1])
        assert old[0].step == new[0].step


def test_compacting_twice_changes_nothing_the_second_time(store):
    compact(store)
    before = {path: path.read_bytes() for path in sorted(store.rglob("*.*"))}
    report = compact(store)
    assert report.shards_compacted == report.bytes_written == 0
    assert before == {path: path.read_bytes() for path in sorted(store.rglob("*.*"))}


def test_training_goes_on_after_compaction(store):
    compact(store)
    trained = trained_store(store, snapshots=2)
    rows = trained.rows()
    trained.checkpointer.save("base")
    trained.checkpointer.close()
    compact(store)
    assert_same(rows, recovered(store)[1])


def test_segments_newer_than_the_newest_snapshot_are_not_merged(tmp_path):
    store = without_full_recovery_points(tmp_path / "store")
    newest = StoreReader(store).newest()
    # As a crash between the last shard's commit and the dense part's leaves it.
    shutil.copytree(store, store.with_name("copy"))
    trained = trained_store(store, snapshots=1)
    trained.checkpointer.close()
    old_dense = store.with_name("copy") / "dense"
    shutil.rmtree(store / "dense")
    shutil.copytree(old_dense, store / "dense")
    expected = recovered(store.with_name("copy"))
    compact(store)
    assert [m.segments[0].snapshot for m in StoreReader(store).shards] == [newest.snapshot] * 3
    assert all(len(m.segments) == 2 for m in StoreReader(store).shards)
    assert_same(expected[1], recovered(store)[1])


def test_a_damaged_segment_is_named_and_everything_left_as_it_was(store):
    reader = StoreReader(store)
    damaged = reader.shards[1].path_of(reader.shards[1].segments[2])
    flip(damaged, damaged.stat().st_size // 2 + 7)
    shard = sorted((store / "shard-00001").iterdir())
    with pytest.raises(DamageError, match=damaged.name):
        compact(store)
    assert sorted((store / "shard-00001").iterdir()) == shard


def test_a_store_in_training_is_refused_and_the_process_named(tmp_path):
    trained = trained_store(tmp_path / "store")
    with pytest.raises(StoreError, match=f"process {os.getpid()}"):
        compact(tmp_path / "store")
    trained.checkpointer.close()
    compact(tmp_path / "store")


@pytest.mark.parametrize("rate", [0, -1.0])
def test_a_bandwidth_that_is_not_positive_is_refused(store, rate):
    with pytest.raises(UsageError, match="bytes_per_second"):
        compact(store, limits=MergeLimits(bytes_per_second=rate))


def test_the_bandwidth_limit_holds(store):
    size = compact_bytes(store)
    started = time.monotonic()
    report = compact(store, limits=MergeLimits(bytes_per_second=4 * size))
    seconds = time.monotonic() - started
    # Nothing waits for the last bytes of each of three segments.
    assert (report.bytes_read + report.bytes_written) / seconds <= 1.4 * 4 * size


def compact_bytes(store):
    copy = store.with_name("for-size")
    shutil.copytree(store, copy)
    report = compact(copy)
    return report.bytes_read + report.bytes_written


def test_the_merged_segment_says_what_it_was_merged_from(store):
    sources = [r.file for r in StoreReader(store).live(0, 10**9)][1:]
    compact(store)
    reader = StoreReader(store)
    merged = reader.open_live(0, 10**9)[-1]
    assert merged.metadata["merged_from"] == sources
    assert (merged.metadata["kind"], merged.metadata["shard"]) == ("merged", 0)


def test_memory_is_bounded_by_the_block(tmp_path):
    """130 MB of rows are merged by a process that may map only a little more than one block."""
    script = """
import resource, sys, torch
import cpr_ext
from torch import nn
from cpr_ext.tools.maintenance import compact
from cpr_ext.storage.merge import MergeLimits
torch.manual_seed(0)
if sys.argv[1] == "make":
    model = nn.Embedding(500_000, 32, sparse=True)
    opt = torch.optim.Adagrad(model.parameters())
    ckpt = cpr_ext.Checkpointer(model, opt, sys.argv[2], schedule=cpr_ext.EverySteps(10**9),
                                rebase_after=None, consistency="step")
    for step in range(3):
        model(torch.randint(0, 500_000, (50_000,))).sum().backward(); opt.step(); opt.zero_grad()
        ckpt.step()
        ckpt.save(); ckpt.wait()
    ckpt.store.dense.commit(ckpt.store.dense.segments[-1:])
    ckpt.close()
else:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = compact(sys.argv[2], limits=MergeLimits(block_bytes=8 << 20))
    assert report.shards_compacted == 1, report
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(report.bytes_after >> 20, round(grown))
"""
    store = str(tmp_path / "store")
    subprocess.run([sys.executable, "-c", script, "make", store], check=True)
    done = subprocess.run(
        [sys.executable, "-c", script, "compact", store], check=True, capture_output=True, text=True
    )
    size_mb, grown_mb = map(int, done.stdout.split())
    assert size_mb > 120
    assert grown_mb < 60


def test_an_interrupted_compaction_leaves_the_old_state(store, monkeypatch):
    expected = recovered(store)[1]

    def die(manifest, merged):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compaction, "commit_merged", die)
        with pytest.raises(KeyboardInterrupt):
            compact(store)
    assert len(verify(store).left_overs) == 1
    assert_same(expected, recovered(store)[1])
    assert verify(store).left_overs == []


@pytest.mark.parametrize("after_seconds", [0.05, 0.2, 0.5, 0.8])
def test_a_compaction_killed_at_any_moment_leaves_the_old_state_or_the_new(tmp_path, after_seconds):
    store = without_full_recovery_points(tmp_path / "store")
    shutil.copytree(store, tmp_path / "copy")
    expected = recovered(tmp_path / "copy")
    rate = compact_bytes(store)  # about a second
    child = os.fork()
    if child == 0:
        try:
            compact(store, limits=MergeLimits(bytes_per_second=rate))
        finally:
            os._exit(0)
    time.sleep(after_seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert verify(store).is_sound
    assert all(shard in (["base"], ["base"] + ["partial"] * 4) for shard in kinds(store))
    assert_same(recovered(store)[1], expected[1])
    assert verify(store).left_overs == []
    compact(store)
    assert kinds(store) == [["base"]] * 3
    assert_same(recovered(store)[1], expected[1])
