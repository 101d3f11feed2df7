"""Who a worker is, and that it is the only one."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from cpr_ext.distributed.identity.worker_identity import (
    Identity,
    RankLock,
    TimeOuts,
    worker_directory,
)
from cpr_ext.errors import StoreError, UsageError
from cpr_ext.storage.locks import DirectoryLock

IDENTITY = Identity(0, 1, "127.0.0.1", 1)
OURS = {"CPR_RANK": "2", "CPR_WORLD_SIZE": "4", "CPR_RENDEZVOUS": "head:29400"}


def test_a_worker_finds_itself_in_the_environment():
    secret = "0123456789abcdef" * 4
    assert Identity.from_environment(OURS) == Identity(2, 4, "head", 29400, "cpr", None)
    identity = Identity.from_environment({**OURS, "CPR_JOB": "b", "CPR_JOB_SECRET": secret})
    assert (identity.job, identity.secret) == ("b", secret)
    assert secret not in repr(identity)
    for known in ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, {"JOB_COMPLETION_INDEX": "2"}):
        others = {"CPR_WORLD_SIZE": "4", "CPR_RENDEZVOUS": "head:29400"}
        assert Identity.from_environment({**others, **known}).rank == 2


@pytest.mark.parametrize(
    ("place", "host", "address"),
    [
        ("localhost:1", "localhost", "127.0.0.1"),
        ("127.0.0.2:1", "127.0.0.2", "127.0.0.1"),
        ("[::1]:1", "::1", "::1"),
        ("[fd00::7]:1", "fd00::7", None),
    ],
)
def test_a_rendezvous_on_loopback_means_that_peers_are_reached_there_too(place, host, address):
    found = Identity.from_environment({**OURS, "CPR_RENDEZVOUS": place})
    assert (found.host, found.address) == (host, address)


def test_what_is_wrong_is_named(tmp_path):
    for environment, message in (
        ({**OURS, "CPR_RANK": "4"}, "worker 4 of 4 cannot be"),
        ({**OURS, "CPR_RANK": "two"}, "CPR_RANK is 'two'"),
        ({**OURS, "CPR_RENDEZVOUS": "head"}, "HOST:PORT"),
        ({**OURS, "CPR_RENDEZVOUS": ""}, "HOST:PORT"),
        ({}, "cpr launch --nproc N SCRIPT"),
    ):
        with pytest.raises(UsageError, match=message):
            Identity.from_environment(environment)
    with pytest.raises(UsageError, match="join_seconds is 0"):
        TimeOuts(join_seconds=0)
    places = [(0, 3), (1, 3), (2, 3), (0, 2)]
    assert len({worker_directory(tmp_path, *place) for place in places}) == 4


def test_the_lock_of_a_process_that_the_others_gave_up_is_overruled_and_it_writes_no_more(tmp_path):
    store = worker_directory(tmp_path, 0, 1)
    store.mkdir()
    given_up = RankLock(tmp_path, IDENTITY, "cut off")
    given_up.acquire(0.1)
    its_store, asked = DirectoryLock(store), []
    successor = RankLock(tmp_path, IDENTITY, "new", lambda m: asked.append(m) or len(asked) > 1)
    successor.acquire(10)
    assert asked == ["cut off", "cut off"]
    with pytest.raises(StoreError, match="Nothing more is written there"):
        its_store.require_in_place()
    DirectoryLock(store).close()
    third = RankLock(tmp_path, IDENTITY, "third", lambda member: member == "cut off")
    with pytest.raises(StoreError, match="is still process"):
        third.acquire(0.1)
    for lock in (given_up, successor):
        lock.release()


HOLDER = """
import ctypes, os, pathlib, sys, time
from cpr_ext.distributed.identity.worker_identity import Identity, RankLock
from cpr_ext.storage.locks import DirectoryLock

folder, fork, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
RankLock(folder, Identity(0, 1, "127.0.0.1", 1)).acquire(1)
store = pathlib.Path(folder, "worker-00000-of-00001")
store.mkdir(parents=True)
lock = DirectoryLock(store)
child = {"python": os.fork, "c": ctypes.PyDLL(None).fork}[fork]()
if child == 0:
    time.sleep(seconds)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


@contextmanager
def killed_holder(folder, fork, seconds):
    """A worker's place and the child of the process that had it, which was killed."""
    command = [sys.executable, "-c", HOLDER, str(folder), fork, str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        child = int(holder.stdout.readline())
        with pytest.raises(StoreError, match=f"worker 0 is still process {holder.pid}"):
            RankLock(folder, IDENTITY).acquire(0.1)
        holder.kill()
        holder.wait()
        try:
            yield RankLock(folder, IDENTITY), holder.pid, child
        finally:
            os.kill(child, signal.SIGKILL)


def test_children_of_a_killed_worker_such_as_data_loaders_do_not_keep_its_place(tmp_path):
    with killed_holder(tmp_path, "python", 60) as (place, _, child):
        place.acquire(0.05)
        os.kill(child, 0)  # it lives
        place.release()


def test_a_lock_that_somebody_keeps_for_moments_is_waited_for(tmp_path):
    with killed_holder(tmp_path, "c", 1.0) as (place, _, _):
        began = time.monotonic()
        place.acquire(20)
        assert time.monotonic() - began > 0.2
        place.release()


def test_who_keeps_a_lock_for_ever_is_named_and_never_a_dead_process(tmp_path):
    with killed_holder(tmp_path, "c", 60) as (place, dead, child):
        with pytest.raises(StoreError) as error:
            place.acquire(0.1)
        assert f"what it started still holds its lock: process {child} after 0.1 s" in str(error)
        assert str(dead) not in str(error)
        # Also if only a lock of the store is kept.
        (tmp_path / "worker-00000-of-00001.lock").unlink()
        store_lock = rf"process {child} after .*worker-00000-of-00001.LOCK"
        with pytest.raises(StoreError, match=store_lock):
            place.acquire(0.1)
        # That one gave its own place back.
        (tmp_path / "worker-00000-of-00001" / "LOCK").unlink()
        RankLock(tmp_path, IDENTITY).acquire(0.1)
