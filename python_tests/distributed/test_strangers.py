"""A job beside somebody who reaches its ports and does not know its secret.

One job is started by `cpr launch`, on a host of its own where there are network namespaces. A
stranger plants and pesters, there and from another host, while it trains and while it recovers.
"""

import ast
import base64
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import cpr_ext
from python_tests.distributed.cluster import ROOT
from python_tests.distributed.namespaces import NoNamespacesError, hosts
from python_tests.distributed.strangers import KINDS, bother, descendants, listening

RANKS = range(2)


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def plant(host, port, path):
    """Put a pickle wherever torch's rendezvous would read its state; ends with 1 if it cannot."""
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
    for number in range(5):
        state = base64.b64encode(pickle.dumps(Payload(f"{path}-{number}")))
        store.set(f"torch.rendezvous.cpr.{number}", state)


@dataclass
class Seen:
    """What was seen of the job."""

    ports: dict = field(default_factory=dict)  # what a process is -> {(address, port)}
    planted: dict = field(default_factory=dict)  # from where -> exit code
    steps_while_pestered: int = 0
    losses_while_pestered: int = 0
    seconds_to_recover: float = 0.0
    pestered_while_recovering: int = 0
    secret: str = ""
    secret_is_in_memory: bool = False
    environments: list = field(default_factory=list)
    command_lines: list = field(default_factory=list)
    said: str = ""
    code: int | None = None
    no_namespaces: str = ""
    address: str = ""


class Watch:
    def __init__(self, folder, prefix):
        self.folder = folder
        self.process = subprocess.Popen(
            [
                *(*prefix, sys.executable, "-m", "cpr_ext.wings.cli", "launch", "--nproc", "2"),
                *(str(Path(__file__).with_name("watched_job.py")), str(folder)),
            ],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )

    def events(self, rank):
        path = self.folder / f"events-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split() for line in lines]

    def pid(self, rank):
        return int(self.events(rank)[-1][0])

    def step(self, rank):
        return max((int(step) for _, kind, step in self.events(rank) if kind == "step"), default=0)

    def wait_until(self, condition, seconds=150):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def by_kind(self):
        """Processes of the job by what they are."""
        workers = {self.pid(rank): f"worker {rank}" for rank in RANKS}
        found = {}
        for pid in descendants(self.process.pid):
            words = Path(f"/proc/{pid}/cmdline").read_text()
            kind = "agent" if "cpr_ext.wings.cli" in words else "spare"
            kind = "host" if "rendezvous_host" in words else workers.get(pid, kind)
            if kind == "agent":
                kind = "agent that hosts" if listening(pid) else kind
                kind = "launcher" if pid == self.process.pid else kind
            found[kind] = pid
        return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory, nursery):
    folder = tmp_path_factory.mktemp("job")
    seen, prefix, nurseries = Seen(), [], [nursery]
    with ExitStack() as stack:
        try:
            network, nurseries = stack.enter_context(hosts(2))
            prefix, seen.address = network.prefix(0), network.address(0)
        except NoNamespacesError as error:
            seen.no_namespaces = str(error)
        watch = Watch(folder, prefix)
        try:
            follow(watch, seen, nurseries)
        finally:
            watch.process.terminate()
            seen.said = watch.process.communicate()[1]
    return seen


def follow(watch, seen, nurseries):
    folder = watch.folder
    watch.wait_until(lambda: all(watch.step(rank) >= 5 for rank in RANKS))
    watch.wait_until(lambda: "spare" in watch.by_kind())
    kinds = watch.by_kind()
    seen.ports = {kind: listening(pid) for kind, pid in kinds.items()}
    look_for_the_secret(kinds, seen)

    port = next(iter(seen.ports["host"]))[1]
    froms = [(nurseries[0], "127.0.0.1", "here")]
    if len(nurseries) > 1:
        froms.append((nurseries[1], seen.address, "elsewhere"))
    for by, host, name in froms:
        arguments = (host, port, str(folder / f"executed-{name}"))
        pid = by.ask("call", __name__, "plant", *arguments)
        seen.planted[name] = by.ask("wait", pid, 100)

    def pester_all():
        places = set().union(*(listening(pid) for pid in watch.by_kind().values()))
        return pester(nurseries[0], places)

    before = watch.step(0)
    pester_all()
    watch.wait_until(lambda: watch.step(0) >= before + 20, seconds=60)
    seen.steps_while_pestered = watch.step(0) - before
    seen.losses_while_pestered = sum(
        kind == "peer_lost" for rank in RANKS for _, kind, _ in watch.events(rank)
    )
    victim, began = watch.pid(1), time.monotonic()
    os.kill(victim, signal.SIGKILL)

    def has_recovered():
        with suppress(FileNotFoundError, ProcessLookupError):
            seen.pestered_while_recovering += pester_all()
        return watch.pid(1) != victim and watch.events(1)[-1][1] == "step"

    watch.wait_until(has_recovered)
    seen.seconds_to_recover = time.monotonic() - began
    (folder / "hurry").touch()
    seen.code = watch.process.wait(150)


def pester(nursery, places):
    """Open connections of all kinds to all places; they stay half open for some seconds."""
    nursery.ask("call", __name__, "pester_from_here", [list(place) for place in places])
    return len(places) * len(KINDS)


def pester_from_here(places):
    kept = []
    for place in places:
        for kind in KINDS:
            with suppress(OSError):
                kept.append(bother(tuple(place), kind, random.Random(1)))
    time.sleep(3.0)


def look_for_the_secret(kinds, seen):
    for pid in kinds.values():
        seen.command_lines.append(Path(f"/proc/{pid}/cmdline").read_text())
        seen.environments.append(Path(f"/proc/{pid}/environ").read_text())
    variables = dict(
        line.split("=", 1)
        for line in Path(f"/proc/{kinds['worker 0']}/environ").read_text().split("\0")
        if "=" in line
    )
    path = Path(variables.get("CPR_JOB_SECRET_FILE", "/nonexistent"))
    if path.exists():
        seen.secret, seen.secret_is_in_memory = path.read_text(), "memfd:" in str(path.readlink())


def test_a_pickle_planted_by_a_stranger_is_executed_by_nobody(seen, tmp_path_factory):
    assert seen.code == 0, seen.said
    assert seen.planted["here"] == 1
    folder = tmp_path_factory.getbasetemp()
    assert list(folder.glob("job*/executed-*")) == []


def test_from_another_host_nothing_of_a_one_machine_job_is_reached(seen):
    if seen.no_namespaces:
        pytest.skip(seen.no_namespaces)
    assert seen.planted["elsewhere"] == 1


def test_a_one_machine_job_listens_on_loopback_only(seen):
    assert {a for places in seen.ports.values() for a, _ in places} == {"127.0.0.1"}


def test_what_listens_is_what_the_table_in_security_md_says(seen):
    table = (ROOT / "SECURITY.md").read_text().split("<!-- listens -->")[1]
    said = {}
    for line in table.strip().splitlines()[2:]:
        who, ports = [cell.strip() for cell in line.strip("|").split("|")][:2]
        said[who] = int(ports)
    found = {kind.rstrip(" 01"): len(p) for kind, p in seen.ports.items()}
    assert found == said


def test_strangers_on_every_port_neither_stop_training_nor_recovery(seen):
    assert seen.steps_while_pestered >= 20
    assert seen.losses_while_pestered == 0
    assert seen.pestered_while_recovering > 0
    assert seen.seconds_to_recover < 60


def test_nothing_is_unpickled_in_a_job_that_loses_a_worker(seen, tmp_path_factory):
    assert seen.code == 0
    for path in tmp_path_factory.getbasetemp().glob("job*/unpickled"):
        pytest.fail(path.read_text()[:3000])


def test_the_secret_is_in_the_launchers_memory_and_nowhere_else(seen):
    assert len(seen.secret) == 64
    assert seen.secret_is_in_memory
    for text in (*seen.command_lines, *seen.environments, seen.said):
        assert seen.secret not in text


def test_no_code_of_ours_unpickles():
    words = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    calls = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}
    calls |= {"send_object_list", "recv_object_list", "TCPStore", "C10dRendezvousBackend"}
    for path in Path(cpr_ext.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            used = set()
            if isinstance(node, ast.Import):
                used = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                used = {str(node.module).split(".")[0], *(alias.name for alias in node.names)}
            elif isinstance(node, ast.Attribute):
                used = {node.attr}
            assert not used & (words | calls), f"{path}:{node.lineno} uses {used}"
