"""The save behind the last step where the disk is really full: a small file system, filled up."""

import os
import subprocess
import threading

import pytest
import torch

import cpr_ext
from cpr_ext.distributed.job import close_saved, save_trained
from cpr_ext.errors import SnapshotError, UsageError
from python_tests.helpers import assert_same


@pytest.fixture
def small_disk(tmp_path):
    """A mounted tmpfs of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk):
    free = os.statvfs(disk)
    with (disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)


def build(directory):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(8000, 8, sparse=True), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    staging = cpr_ext.StagingOptions(slot_bytes=64 << 10)
    return model, optimizer, cpr_ext.Checkpointer(model, optimizer, directory, staging=staging)


def make_trained(disk, steps=3):
    """A model, and its Checkpointer."""
    model, optimizer, checkpointer = build(disk / "store")
    checkpointer.recover()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(0, 8000, (64, 4))).sum().backward()
        optimizer.step()
        checkpointer.step(64)
    checkpointer.wait()  # no snapshot is written while the disk is filled
    return model, checkpointer


@pytest.mark.filterwarnings("ignore")
def test_a_full_disk_is_waited_for_and_the_model_is_saved_once_there_is_space(small_disk, caplog):
    model, checkpointer = make_trained(small_disk)
    fill(small_disk)
    threading.Timer(1.0, (small_disk / "filler").unlink).start()
    save_trained(checkpointer, 1, retry_seconds=30.0)
    close_saved(checkpointer)
    assert "worker 1 cannot save the trained model" in caplog.text
    assert "No space left on device" in caplog.text
    fresh, _, again = build(checkpointer.store.directory)
    with again:
        assert again.recover().step == 3
    assert_same(fresh.state_dict(), model.state_dict())


def test_what_no_waiting_mends_is_an_error(small_disk):
    """A disk that stays full, in the end; a closed Checkpointer at once."""
    checkpointer = make_trained(small_disk)[1]
    fill(small_disk)
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
    fill(small_disk)
    cluster.wait_until(lambda: "cannot save the trained model" in cluster.logs())
    (small_disk / "filler").unlink()
    cluster.finish()
    for rank in cluster.ranks:
        assert cluster.events(rank, "peer_lost") == []
        assert len({event["pid"] for event in cluster.events(rank)}) == 1
