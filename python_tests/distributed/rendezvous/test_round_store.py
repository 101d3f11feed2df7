"""Notes that workers leave for each other, the store of a round, and calls without an end."""

import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from cpr_ext.distributed.identity.worker_identity import Identity
from cpr_ext.distributed.rendezvous.host_connection import HostConnection
from cpr_ext.distributed.rendezvous.round_store import RoundStore, call_with_timeout, named
from cpr_ext.distributed.rendezvous_host import listen

SECRET = "of-the-tests-of-notes-and-no-other"


def connection(place, job="cpr", rank=0):
    return HostConnection(Identity(rank, 2, *place, job, secret=SECRET))


def test_notes_are_there_for_all_workers_of_a_job_and_for_no_other(place):
    connection(place, "a").ask("write", key="folder/key", text="said")
    asked = ("a", ["folder/key"]), ("b", ["folder/key"]), ("a", ["folder/key", "two"]), ("a", [])
    found = [connection(place, job).ask("has", **named(keys))["are_there"] for job, keys in asked]
    assert found == [True, False, False, True]


_connected = []  # members, whose rounds would be over without


@pytest.fixture(autouse=True)
def members():
    yield
    while _connected:
        _connected.pop().close()


def meet(place, rank, token, job):
    claim = {"rank": rank, "world_size": 1, "member": "one process", "epoch": 0, "roster": []}
    claim |= {"seen": 0, "run": "", "who": ""}
    _connected.append(connection(place, job, rank))
    asked = {"claim": claim, "token": token, "lease_seconds": 5.0, "seconds": 0.0}
    return _connected[-1].ask("meet", **asked)["round"]


def test_what_members_of_a_round_leave_in_its_store_is_there_for_its_members_only(place):
    first = meet(place, 0, "one", "rounds")
    store = RoundStore(connection(place, "rounds"), first)
    store.set("key", b"\x00\xff")
    assert store.get("key") == b"\x00\xff"
    assert [store.check(keys) for keys in (["key"], ["key", "other"])] == [True, False]
    second = RoundStore(connection(place, "rounds"), meet(place, 0, "two", "rounds"))
    assert not second.check(["key"])
    assert not store.check(["key"])  # nobody is in that round any more


def test_all_values_are_had_by_one_request_and_what_is_missing_is_named(place):
    round_id = meet(place, 0, "one", "many")
    host = connection(place, "many")
    store, asked = RoundStore(host, round_id), []
    host.ask = lambda what, **values: asked.append(what) or HostConnection.ask(host, what, **values)
    names = [f"group/{number}" for number in range(20)]
    for name in names[:9]:
        store.set(name, name.encode())
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError, match=r"11 of 20 values .* group/9, .* and 3 more"):
        store.multi_get(names)
    for name in names[9:]:
        store.set(name, name.encode())
    asked.clear()
    assert store.multi_get(names) == [name.encode() for name in names]
    assert asked == ["gather"]
    store.set(names[3], b"another")
    assert store.multi_get(names)[3] == b"another"


def test_a_round_that_is_over_or_ends_is_not_waited_for(place):
    old = RoundStore(connection(place, "over"), meet(place, 0, "one", "over"))
    threading.Timer(0.3, meet, (place, 0, "two", "over")).start()
    for _ in range(2):
        with pytest.raises(dist.DistStoreError, match="this round is over"):
            old.get("key")


def test_who_waits_for_values_of_a_round_hears_that_a_member_has_ended(place):
    """One that had no time to arrive."""
    old = RoundStore(connection(place, "loses"), meet(place, 0, "one", "loses"))
    store, heard = threading.Thread(target=lambda: heard.append(failure_of(old))), []
    store.start()
    _connected.pop().close()
    store.join()
    assert heard == ["a member of this round has ended"]
    assert failure_of(old) == heard[0]


def failure_of(store):
    with pytest.raises(dist.DistStoreError) as caught:
        store.get("never there")
    return str(caught.value)


def test_a_host_that_does_not_answer_is_an_error_of_torchs_kind():
    with listen("127.0.0.1", 0) as nobody:
        host = connection(nobody.getsockname())
        ask = host.ask
        host.ask = lambda what, **values: ask(what, **{**values, "limit_seconds": 0.2})
        with pytest.raises(dist.DistNetworkError, match="does not answer: timed out"):
            RoundStore(host, "round").get("key")


def test_a_call_that_has_no_end_is_left_behind():
    """Others return or raise; also once nobody needs the answer."""
    assert call_with_timeout(5, "nobody", lambda: 7) == 7
    with pytest.raises(KeyError):
        call_with_timeout(5, "nobody", lambda: {}["missing"])
    never, until = threading.Event(), threading.Event()
    with pytest.raises(dist.DistNetworkError, match="host:1 does not answer"):
        call_with_timeout(0.01, "host:1", never.wait)
    threading.Timer(0.1, until.set).start()
    with pytest.raises(dist.DistNetworkError):
        call_with_timeout(1e6, "host:1", never.wait, until.is_set)
    never.set()


ENDS_WHILE_CONNECTING = """
import asyncio, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from cpr_ext.distributed.rendezvous.host_connection import HostConnection
from cpr_ext.distributed.identity.worker_identity import Identity
from cpr_ext.distributed.rendezvous.round_store import RoundStore, call_with_timeout


class ComesBackLate(RoundStore):
    def _gather(self, keys, time_out):
        waiting.set()
        try:
            return super()._gather(keys, timedelta(seconds=20))
        finally:
            time.sleep(0.3)


class EndsSlowly:
    def __del__(self):
        time.sleep(1.0)


waiting, slow = threading.Event(), EndsSlowly()
identity = Identity(0, 2, sys.argv[1], int(sys.argv[2]), secret=sys.argv[3])
store = ComesBackLate(HostConnection(identity), sys.argv[4])
try:
    limit = timedelta(seconds=20)
    call_with_timeout(0.5, "nobody", lambda: dist.ProcessGroupGloo(store, 0, 2, limit))
except dist.DistNetworkError:
    assert waiting.is_set()
    threading.Timer(0.1, store._host.interrupt).start()  # as if the host died
    sys.exit(7)
"""


def test_a_worker_that_ends_while_it_connects_is_not_aborted(place):
    round_id = meet(place, 0, "one", "cpr")
    command = [sys.executable, "-c", ENDS_WHILE_CONNECTING, *map(str, place), SECRET, round_id]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
