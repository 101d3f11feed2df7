"""Connections of a group of two members, here in threads of one process."""

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from cpr_ext.distributed.collective import connections
from cpr_ext.distributed.collective.connections import AddressStore, close_connections
from python_tests.distributed.parity.members import formed

SECONDS = 20.0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_waits_for_a_closed_connection_fails_and_no_other_is_closed(host):
    try:
        (near, addresses), (far, _) = formed(2, host=host, seconds=SECONDS)
        (other, _), (peer, _) = formed(2, host=host, seconds=SECONDS)
    except RuntimeError as error:
        if host == "::1":
            pytest.skip(f"no IPv6 here: {error}")
        raise
    begin = time.monotonic()
    works = [group.recv([torch.empty(1)], 1 - rank, 0) for rank, group in enumerate((near, far))]
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as another:
            close_connections([addresses])
            for work in works:
                with pytest.raises(RuntimeError):
                    work.wait(timedelta(seconds=SECONDS))
            assert time.monotonic() - begin < SECONDS / 2
            one.sendall(b"still open")
            assert another.recv(20) == b"still open"
    received = torch.empty(1)
    receiving = peer.recv([received], 0, 0)
    other.send([torch.tensor([7.0])], 1, 0).wait()
    receiving.wait(timedelta(seconds=SECONDS))
    assert received.tolist() == [7.0]


def test_other_sockets_descriptors_and_locks_of_files_stay_as_they_were(tmp_path):
    """A default time-out would make sockets non-blocking."""
    (_, addresses), (_, others) = formed(2)
    socket.setdefaulttimeout(5)
    try:
        with (tmp_path / "file").open("w") as file, socket.socket() as other:
            other.setblocking(True)
            fcntl.lockf(file, fcntl.LOCK_EX)
            before = set(Path("/dev/fd").iterdir())
            close_connections([addresses])
            assert set(Path("/dev/fd").iterdir()) <= before
            assert os.get_blocking(other.fileno())
            code = "from fcntl import *; lockf(open({!r}, 'w'), LOCK_EX | LOCK_NB)"
            command = [sys.executable, "-c", code.format(file.name)]
            tried = subprocess.run(command, capture_output=True)
            assert b"BlockingIOError" in tried.stderr
    finally:
        socket.setdefaulttimeout(None)
    begin = time.monotonic()
    close_connections([addresses, others])  # which peers have closed already
    close_connections([])
    assert time.monotonic() - begin < 5


def test_threads_that_close_connections_at_once_do_not_wait_for_each_other(monkeypatch):
    monkeypatch.setattr(connections, "_PATIENCE_SECONDS", SECONDS)
    begin = time.monotonic()
    (_, addresses), _members = formed(2, seconds=SECONDS)
    threads = [threading.Thread(target=close_connections, args=([addresses],)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < SECONDS / 2


def test_a_store_passes_on_all_that_torch_asks_of_it():
    inner = HashStore()
    store = AddressStore(inner, SECONDS)
    store.set("a", "value")
    assert inner.get("a") == store.get("a") == b"value"
    assert [store.check([name]) for name in "ab"] == [True, False]
    store.wait(["a"])
    store.set_timeout(timedelta(seconds=0.05))
    for time_out in ((), (timedelta(seconds=0.05),)):
        with pytest.raises(RuntimeError):
            store.wait(["b"], *time_out)


def test_connections_to_members_that_do_not_answer_are_ended_and_no_other():
    store = AddressStore(HashStore(), SECONDS)
    with contextlib.ExitStack() as opened:
        members, tried = [], []
        for _ in range(2):
            silent = opened.enter_context(socket.socket())
            silent.bind(("127.0.0.1", 0))
            silent.listen(0)  # what does not fit into its queue gets no answer
            for _ in range(3):
                connecting = opened.enter_context(socket.socket())
                connecting.setblocking(False)
                connecting.connect_ex(silent.getsockname())
            members.append(silent.getsockname())
            tried.append(connecting)
        host, port = members[0]
        family = struct.pack("=H", socket.AF_INET)
        store.set("0", b"name" + family + struct.pack("!H", port) + socket.inet_aton(host))
        assert connections.end_connecting(store) == ["127.0.0.1"]
        tries = [t.getsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT) for t in tried]
        assert [number == 1 for number in tries] == [True, False]
