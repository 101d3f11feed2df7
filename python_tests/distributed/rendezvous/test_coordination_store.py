"""Notes that workers leave for each other, the store of a round, and calls without an end."""

import asyncio
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from cpr_ext.distributed.identity.worker_identity import Identity
from cpr_ext.distributed.rendezvous.coordination_store import Notes, call_with_timeout
from cpr_ext.distributed.rendezvous.host import Host
from cpr_ext.distributed.rendezvous.host_connection import HostConnection
from cpr_ext.distributed.rendezvous.round_store import RoundStore
from cpr_ext.distributed.rendezvous_host import listen

SECRET = "of-the-tests-of-notes-and-no-other"


@pytest.fixture(scope="module")
def place():
    listener = listen("127.0.0.1", 0)
    serving = Host(SECRET.encode(), is_first=True).serve(listener)
    threading.Thread(target=asyncio.run, args=(serving,), daemon=True).start()
    return listener.getsockname()


def connection(place, job="cpr", rank=0):
    return HostConnection(Identity(rank, 2, *place, job, secret=SECRET))


def test_a_note_is_read_by_all_workers_of_its_job_and_by_no_other(place):
    Notes(connection(place, "a")).write("key", "said")
    assert Notes(connection(place, "a")).read("key") == "said"
    assert Notes(connection(place, "b")).read("key") == ""


def test_all_notes_are_there_or_not(place):
    notes = Notes(connection(place, "d"))
    notes.write("one", "1")
    assert notes.has(["one"])
    assert not notes.has(["one", "two"])


def meet(place, rank, token, job):
    claim = {
        "rank": rank,
        "world_size": 1,
        "member": "one process",
        "epoch": 0,
        "roster": [],
        "seen": 0,
    }
    return connection(place, job, rank).ask(
        "meet", claim={**claim, "run": "", "who": ""}, token=token, lease_seconds=5.0, seconds=0.0
    )["round"]


def test_what_members_of_a_round_leave_in_its_store_is_there_for_its_members_only(place):
    first = meet(place, 0, "one", "rounds")
    store = RoundStore(connection(place, "rounds"), first)
    store.set("key", b"\x00\xff")
    assert store.get("key") == b"\x00\xff"
    assert store.check(["key"])
    assert not store.check(["key", "other"])
    second = RoundStore(connection(place, "rounds"), meet(place, 0, "two", "rounds"))
    assert not second.check(["key"])
    assert not store.check(["key"])  # nobody is in that round any more


def test_a_value_is_waited_for_until_it_is_there_or_time_is_up(place):
    round_id = meet(place, 0, "one", "waits")
    store = RoundStore(connection(place, "waits"), round_id)
    threading.Timer(0.2, RoundStore(connection(place, "waits"), round_id).set, ("k", "v")).start()
    assert store.get("k") == b"v"
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="missing: not there in time"):
        store.wait(["missing"], timedelta(seconds=0.3))
    assert 0.2 < time.monotonic() - began < 30


def test_a_host_that_does_not_answer_is_an_error_of_torchs_kind():
    with listen("127.0.0.1", 0) as nobody:
        host = connection(nobody.getsockname())
        host.ask = lambda what, **values: HostConnection.ask(
            host, what, **{**values, "limit_seconds": 0.2}
        )
        with pytest.raises(dist.DistNetworkError, match="does not answer: timed out"):
            RoundStore(host, "round").get("key")


def test_what_a_call_returns_or_raises_is_handed_on():
    assert call_with_timeout(5, "nobody", lambda: 7) == 7
    with pytest.raises(KeyError):
        call_with_timeout(5, "nobody", lambda: {}["missing"])


def test_a_call_that_has_no_end_is_left_behind():
    never = threading.Event()
    with pytest.raises(dist.DistNetworkError, match="host:1 does not answer"):
        call_with_timeout(0.01, "host:1", never.wait)
    never.set()


ENDS_WHILE_CONNECTING = """
import asyncio, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from cpr_ext.distributed.rendezvous.host_connection import HostConnection
from cpr_ext.distributed.identity.worker_identity import Identity
from cpr_ext.distributed.rendezvous.coordination_store import call_with_timeout
from cpr_ext.distributed.rendezvous.round_store import RoundStore


class ComesBackLate(RoundStore):
    def wait(self, keys, time_out=None):
        waiting.set()
        try:
            super().wait(keys, timedelta(seconds=20))
        finally:
            time.sleep(0.3)


class EndsSlowly:
    def __del__(self):
        time.sleep(1.0)


waiting, slow = threading.Event(), EndsSlowly()
identity = Identity(0, 2, sys.argv[1], int(sys.argv[2]), secret=sys.argv[3])
store = ComesBackLate(HostConnection(identity), "r")
try:
    limit = timedelta(seconds=20)
    call_with_timeout(0.5, "nobody", lambda: dist.ProcessGroupGloo(store, 0, 2, limit))
except dist.DistNetworkError:
    assert waiting.is_set()
    threading.Timer(0.1, store._host.interrupt).start()  # as if the host died
    sys.exit(7)
"""


def test_a_worker_that_ends_while_it_connects_is_not_aborted(place):
    command = [sys.executable, "-c", ENDS_WHILE_CONNECTING, *map(str, place), SECRET]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
