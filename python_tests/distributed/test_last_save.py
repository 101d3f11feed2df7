"""The save behind the last step where the disk is really full: a small file system, filled up."""

import os
import subprocess
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cpr_ext
from cpr_ext.distributed.identity.worker_identity import Identity, worker_directory
from cpr_ext.distributed.last_save import LastSave, close_saved
from cpr_ext.errors import SnapshotError, StoreError, UsageError

IDENTITY = Identity(1, 2, "127.0.0.1", 1)


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


def make_job(disk, steps=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(8000, 8, sparse=True), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    def make(directory):
        return cpr_ext.Checkpointer(
            model, optimizer, directory, staging=cpr_ext.StagingOptions(slot_bytes=64 << 10)
        )

    checkpointer = make(worker_directory(disk / "store", 1, 2))
    checkpointer.recover()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(0, 8000, (64, 4))).sum().backward()
        optimizer.step()
        checkpointer.step(64)
    checkpointer.wait()  # no snapshot is written while the disk is filled
    job = SimpleNamespace(
        model=model, optimizers=optimizer, checkpointer=checkpointer, step=checkpointer.step_count
    )
    return job, make


def state_of(job):
    return {name: value.clone() for name, value in job.model.state_dict().items()}


def assert_recovers(directory, expected, step):
    fresh = torch.nn.Sequential(torch.nn.EmbeddingBag(8000, 8, sparse=True), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adagrad(fresh.parameters(), lr=0.1)
    with cpr_ext.Checkpointer(
        fresh, optimizer, directory, staging=cpr_ext.StagingOptions(slot_bytes=64 << 10)
    ) as checkpointer:
        assert checkpointer.recover().step == step
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, expected[name])


def test_a_full_disk_is_waited_for_and_the_model_is_saved_once_there_is_space(small_disk, caplog):
    job, make = make_job(small_disk)
    fill(small_disk)
    freed = threading.Timer(1.0, (small_disk / "filler").unlink)
    freed.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LastSave(IDENTITY, retry_seconds=30.0).save(job, make)
        close_saved(job.checkpointer)
    assert "worker 1 cannot save the trained model" in caplog.text
    assert "No space left on device" in caplog.text
    assert_recovers(job.checkpointer.store.directory, state_of(job), step=3)


def test_a_disk_that_stays_full_is_left_for_another_directory(small_disk, tmp_path, caplog):
    job, make = make_job(small_disk)
    fill(small_disk)
    last_save = LastSave(IDENTITY, retry_seconds=0.6, elsewhere=tmp_path / "other")
    expected = state_of(job)
    last_save.refuse_forgotten(small_disk / "store")
    last_save.save(job, make)
    close_saved(job.checkpointer)
    assert "saved it to" in caplog.text
    assert all(torch.equal(value, expected[name]) for name, value in state_of(job).items())
    # The next run does not continue from the older store by mistake; it says what to do.
    with pytest.raises(StoreError, match="move that directory to") as error:
        last_save.refuse_forgotten(small_disk / "store")
    (saved,) = (tmp_path / "other").glob("step-*/worker-00001-of-00002")
    assert str(saved) in str(error.value)
    assert_recovers(saved, expected, step=3)


def test_without_another_directory_the_error_comes_out_in_the_end(small_disk):
    job, make = make_job(small_disk)
    fill(small_disk)
    with pytest.raises(SnapshotError):
        LastSave(IDENTITY, retry_seconds=0.6).save(job, make)
    job.checkpointer.__exit__(SnapshotError, None, None)


def test_what_no_waiting_mends_is_raised_at_once(tmp_path):
    job, make = make_job(tmp_path)
    job.checkpointer.close()
    with pytest.raises(UsageError, match="closed"):
        LastSave(IDENTITY, retry_seconds=60.0).save(job, make)


def test_a_worker_with_a_full_disk_keeps_its_rows_and_its_peers_wait(small_disk, make_cluster):
    cluster = make_cluster(
        num_steps=20,
        world_size=2,
        step_seconds=0.02,
        every_steps=1000,
        stores=str(small_disk / "s"),
    )
    cluster.start()
    cluster.wait_for_step(3)
    fill(small_disk)
    cluster.wait_until(lambda: "cannot save the trained model" in cluster.logs())
    (Path(small_disk) / "filler").unlink()
    cluster.finish()
    for rank in cluster.ranks:
        assert cluster.events(rank, "peer_lost") == []
        assert len({event["pid"] for event in cluster.events(rank)}) == 1
