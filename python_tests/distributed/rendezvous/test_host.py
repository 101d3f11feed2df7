"""The rendezvous' host, and those who reach it without the job's secret."""

import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from cpr_ext.distributed.identity.worker_identity import Identity
from cpr_ext.distributed.rendezvous import host as host_module
from cpr_ext.distributed.rendezvous import host_connection, wire
from cpr_ext.distributed.rendezvous.host_connection import (
    HostConnection,
    HostError,
    UntrustedHostError,
)
from cpr_ext.distributed.rendezvous_host import listen
from cpr_ext.errors import RendezvousError, UsageError
from python_tests.distributed.strangers import KINDS, bother, listening

SECRET = "of-the-tests-of-the-host-and-no-other"
COMMAND = [sys.executable, "-m", "cpr_ext.distributed.rendezvous_host"]
PROMPT_SECONDS = 60.0  # on a busy machine, too


class Host:
    def __init__(self, folder):
        secret = folder / "secret"
        secret.write_text(SECRET + "\n")
        self.log = folder / "log"
        environment = {**os.environ, "CPR_JOB_SECRET_FILE": str(secret)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "--port", "0"], env=environment, stdout=subprocess.PIPE, stderr=log
            )
        self.port = int(self.process.stdout.readline().split()[-1])
        self.place = ("127.0.0.1", self.port)

    def connection(self, secret=SECRET, job="cpr"):
        return HostConnection(Identity(0, 2, *self.place, job=job, secret=secret))

    def memory(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    host = Host(tmp_path_factory.mktemp("host"))
    yield host
    host.process.kill()
    host.process.wait()
    host.process.stdout.close()


def write(connection, key, text):
    connection.ask("write", key=key, text=text)


def read(connection, key):
    return wire.unpack(connection.ask("gather", prefix="", keys=[key], seconds=0.0)["values"])[0]


def ask_promptly(host):
    """Connect, prove, leave a note and read it, within moments."""
    began = time.monotonic()
    with closing(host.connection()) as connection:
        connection.answer_seconds = PROMPT_SECONDS
        write(connection, "prompt", "yes")
        assert read(connection, "prompt") == "yes"
    assert time.monotonic() - began < PROMPT_SECONDS


def test_a_worker_with_another_secret_is_refused_and_the_host_says_so(host):
    write(host.connection(), "ours", "here")
    for secret in ("a-secret-of-somebody-else-entirely", SECRET + "!"):
        other = host.connection(secret)
        with pytest.raises(UntrustedHostError, match=f"{host.port} refused this worker's secret"):
            read(other, "ours")
        with pytest.raises(UntrustedHostError):
            write(other, "ours", "planted")
    with pytest.raises(RuntimeError):  # nor a client of torch's own
        dist.TCPStore(*host.place, is_master=False, timeout=timedelta(seconds=1))
    assert read(host.connection(), "ours") == "here"
    said = host.log.read_text()
    assert "did not prove to know the job's secret, the last from 127.0.0.1" in said
    assert SECRET not in said


def test_what_a_worker_said_once_is_refused_if_somebody_says_it_again(host, monkeypatch):
    heard, send = bytearray(), host_connection._send

    def overheard(connected, content, deadline):
        heard.extend(content)
        send(connected, content, deadline)

    with monkeypatch.context() as patched, closing(host.connection()) as recorded:
        patched.setattr(host_connection, "_send", overheard)
        write(recorded, "step", "old")
    assert len(heard) > 64
    assert SECRET.encode() not in heard
    write(host.connection(), "step", "new")
    for content in (heard, heard + heard):
        with socket.create_connection(host.place, 2) as again:
            again.sendall(content)
            with suppress(OSError):
                while again.recv(4096):
                    pass  # until the host closes it
    assert read(host.connection(), "step") == "new"


def test_a_connection_that_another_took_over_cannot_say_anything_more(host):
    connection = host.connection()
    write(connection, "mine", "here")
    taken = connection._socket
    taken.sendall((40).to_bytes(4, "big") + bytes(40 + 32))
    assert taken.recv(1) == b""
    with pytest.raises(HostError):
        read(connection, "mine")
    assert read(connection, "mine") == "here"  # over a new one


def test_many_strangers_hold_nobody_up_and_are_shown_out(host):
    ask_promptly(host)
    before = host.memory()
    strangers = []
    for kind in KINDS:
        strangers += [bother(host.place, kind) for _ in range(host_module.MAX_STRANGERS // 2)]
        ask_promptly(host)
    deadline = time.monotonic() + host_module.PROOF_SECONDS + 3.0
    for stranger in strangers:
        with stranger, suppress(ConnectionError):
            stranger.settimeout(deadline - time.monotonic())
            while stranger.recv(4096):
                pass  # until the host closes it
    assert host.memory() - before < 32 << 20


def test_a_flood_of_connections_holds_nobody_up_for_long(host):
    is_over, opened = threading.Event(), []

    def flood():
        while not is_over.is_set():
            with suppress(OSError):
                opened.append(bother(host.place, "garbage"))
            if len(opened) > 200:
                opened.pop(0).close()
            time.sleep(0.001)  # hundreds a second: this thread takes the processor from the test's

    with ThreadPoolExecutor(1) as pool:
        pool.submit(flood)
        for _ in range(5):
            ask_promptly(host)
            time.sleep(0.1)
        is_over.set()
    for connection in opened:
        connection.close()


@pytest.mark.parametrize("said", [b"", b"garbage" * 30, b"cpr_ext rendezvous 1\n" + bytes(64)])
def test_a_worker_believes_nobody_in_the_hosts_place(said):
    is_asked = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:

        def answer():
            accepted, _ = impostor.accept()
            with accepted, suppress(OSError):
                accepted.sendall(said)
                accepted.recv(4096)
                is_asked.wait(10)

        pool.submit(answer)
        connection = HostConnection(Identity(0, 2, *impostor.getsockname(), secret=SECRET))
        began = time.monotonic()
        with pytest.raises(HostError):
            connection.ask("has", keys=["x"], prefix="", limit_seconds=0.5)
        assert time.monotonic() - began < PROMPT_SECONDS
        is_asked.set()


def test_without_a_secret_nobody_hosts_and_nobody_joins(host):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CPR_JOB_SECRET")}
    command = [*COMMAND, "--host", "0.0.0.0", "--port", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "the job has no secret" in done.stderr
    assert "set CPR_JOB_SECRET_FILE" in done.stderr
    with pytest.raises(UsageError, match="the job has no secret"):
        host.connection(secret=None)


def test_it_listens_on_the_address_it_was_given_and_loopback_by_default(host):
    assert listening(host.process.pid) == {host.place}
    with listen("127.0.0.2", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.2"
        with pytest.raises(RendezvousError, match="Address already in use"):
            listen(*listener.getsockname())
    with pytest.raises(RendezvousError, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", 0)


def test_requests_that_mean_nothing_are_answered_by_an_error_and_the_host_lives(host):
    connection = host.connection()
    for what, values in [
        ("nothing", {}), ("write", {}), ("meet", {"rank": "x"}),
        ("has", {"keys": 1, "prefix": ""}), ("has", {"keys": [1], "prefix": ""}),
        ("gather", {"keys": ["x"], "seconds": 0}),
        ("gather", {"keys": ["x"], "prefix": "", "seconds": "y"}),
    ]:  # fmt: skip
        with pytest.raises(Exception, match="not understood"):
            connection.ask(what, **values)
    ask_promptly(host)


def attend(host, token, adopt_seconds=0.0):
    connection = host.connection(job="of agents")
    agent = {"token": token, "num_nodes": 2, "had": None, "only": None}
    connection.ask("attend", agent={**agent, "adopt_seconds": adopt_seconds})
    return connection


def test_the_host_looks_after_agents_when_a_process_that_waits_is_reset(host):
    """As that of a machine that has vanished; the host has not read of its end yet."""
    waiting = host.connection(job="of agents")
    deadline = time.monotonic() + PROMPT_SECONDS
    connected = waiting._connect_again(deadline)
    question = {"ask": "node", "job": "of agents", "agent": "nobody", "seconds": 60}
    connected.sendall(waiting._asked.seal(question))
    time.sleep(0.5)  # until the host waits, too
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connected.close()
    time.sleep(1.0)
    with closing(attend(host, "first")), closing(attend(host, "second", adopt_seconds=0.5)):
        with closing(host.connection(job="of agents")) as worker:
            assert worker.ask("node", agent="second", seconds=10, limit_seconds=60)["node"] == 1


def test_a_new_host_tells_of_a_member_that_only_the_one_before_had_heard_of(host):
    def claim(rank, member, **shown):
        numbers = {"rank": rank, "world_size": 2, "epoch": 0, "seen": 0, **shown}
        return {**numbers, "member": member, "run": "a", "who": member, "roster": [], **shown}

    trains, comes = host.connection(job="restarted"), host.connection(job="restarted")
    first = {"epoch": 1, "seen": 1, "roster": ["left", "lost"]}
    assert trains.ask("arrive", claim=claim(0, "left", **first)) == {}
    news, deadline = [], time.monotonic() + 30
    listening = threading.Thread(target=lambda: news.append(trains.wait_for_news()), daemon=True)
    listening.start()
    while not news and time.monotonic() < deadline:  # the host knows all once it is 3 s old
        comes.ask("meet", claim=claim(1, "new"), token="new", seconds=0.2, lease_seconds=5)
    assert news == [{"lost_of": 1, "is_silent": True}]
    comes.close(), trains.interrupt()
