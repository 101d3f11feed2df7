"""The save behind the last step where the disk is really full: a small file system, filled up."""

import pytest
import torch

import cpr_ext
from cpr_ext.distributed.job import save_trained
from cpr_ext.errors import SnapshotError, UsageError
from cpr_ext.storage.manifest import read_manifest


def make_trained(disk, steps=3):
    """The Checkpointer of a model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(8000, 8, sparse=True), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    staging = cpr_ext.StagingOptions(slot_bytes=64 << 10)
    checkpointer = cpr_ext.Checkpointer(model, optimizer, disk / "store", staging=staging)
    checkpointer.recover()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(0, 8000, (64, 4))).sum().backward()
        optimizer.step()
        checkpointer.step(64)
    checkpointer.wait()  # no snapshot is written while the disk is filled
    return checkpointer


def test_what_no_waiting_mends_is_an_error(small_disk):
    """A disk that stays full, in the end; a closed Checkpointer at once."""
    checkpointer = make_trained(small_disk)
    small_disk.fill()
    with pytest.raises(SnapshotError):
        save_trained(checkpointer, 1, retry_seconds=0.6)
    checkpointer.__exit__(SnapshotError, None, None)
    with pytest.raises(UsageError, match="closed"):
        save_trained(checkpointer, 1, retry_seconds=60.0)


def test_a_worker_with_a_full_disk_keeps_its_rows_and_its_peers_wait(small_disk, make_cluster):
    cluster = make_cluster(
        num_steps=20, world_size=2, step_seconds=0.02, every_steps=1000, stores=str(small_disk)
    )
    cluster.start()
    cluster.wait_for_step(3)
    small_disk.fill()
    cluster.wait_until(lambda: "cannot save the trained model" in cluster.logs())
    (small_disk / "filler").unlink()
    cluster.finish()
    for rank in cluster.ranks:
        [newest] = cluster.stores.glob(f"worker-{rank:05d}-of-*/MANIFEST.json")
        assert read_manifest(newest.parent).dense[-1].last_step == 20
        assert cluster.events(rank, "peer_lost") == []
        assert len({event["pid"] for event in cluster.events(rank)}) == 1
