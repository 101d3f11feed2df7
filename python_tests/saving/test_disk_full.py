"""A really full disk: a file system of a few megabytes, filled up while training goes on."""

import errno
import warnings

import pytest

import cpr_ext
from cpr_ext.wings.tools.maintenance import verify
from python_tests.helpers import Trained, assert_same

OPTIONS = {
    "tables": {"big": (6000, 8)},  # 375 kB with its optimizer state
    "num_shards": 2,
    "staging": cpr_ext.StagingOptions(slot_bytes=64 << 10),
    "lookups": 200,
    "schedule": cpr_ext.EverySteps(10**9),
}


def begin(disk, **options):
    """A run whose first base is durable."""
    trained = Trained(disk / "store", **OPTIONS, **options)
    trained.checkpointer.recover()
    trained.train(1)
    trained.checkpointer.wait()
    return trained


def save(trained, kind="partial"):
    """True if it was committed."""
    snapshot = trained.checkpointer.save(kind)
    snapshot.wait_until_done(30)
    trained.checkpointer._saver.settle(warn=False)
    assert snapshot.error is None or snapshot.error.errno == errno.ENOSPC
    return snapshot.error is None


@pytest.mark.parametrize("left_bytes", [0, 40_000, 200_000])
def test_training_finishes_on_a_full_disk_and_nothing_committed_is_lost(small_disk, left_bytes):
    trained = begin(small_disk, priority=cpr_ext.AllRows())
    trained.train(5)
    assert save(trained)
    small_disk.fill(left_bytes)
    trained.train(5)
    assert not save(trained, "base")
    trained.train(5)  # training goes on
    assert verify(small_disk / "store").is_sound
    (small_disk / "filler").unlink()
    assert save(trained)  # only changed rows: those of the failed snapshot are among them
    rows = trained.rows()
    assert trained.checkpointer.metrics.failed_snapshots == 1
    trained.checkpointer.close()
    other = Trained(small_disk / "store", **OPTIONS)
    assert other.checkpointer.recover().step == 16
    assert_same(other.rows(), rows)
    other.die()
    assert verify(small_disk / "store").left_overs == []


@pytest.mark.parametrize("allowed", [False, True])
def test_history_gives_way_to_the_next_snapshot_if_that_is_allowed(small_disk, allowed):
    retention = cpr_ext.Retention(full_recovery_points=5, release_when_full=allowed)
    trained = begin(small_disk, store=cpr_ext.StoreOptions(retention=retention))
    for _ in range(2):
        trained.train(3)
        assert save(trained, "base")
    trained.train(3)
    assert sum(r.kind == "base" for r in trained.store.manifest.rows) == 3
    small_disk.fill(100_000)  # the next base has no room, unless two old ones go
    assert not save(trained, "base")
    assert save(trained, "base") is allowed
    bases = [r for r in trained.store.manifest.rows if r.kind == "base"]
    assert len(bases) == (2 if allowed else 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained.die()
    assert verify(small_disk / "store").is_sound
