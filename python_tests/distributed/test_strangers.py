"""A job beside somebody who reaches its ports and does not know its secret.

One job is started by `cpr launch`, on a host of its own where there are network namespaces. A
stranger plants and pesters, there and from another host, while it trains and while it recovers.
"""

import ast
import base64
import os
import pickle
import random
import re
import signal
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import cpr_ext
from python_tests.distributed.agents import LAUNCH, Started, closing
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


class Watch(Started):
    """The job, on a host of its own if there is a network."""

    def __init__(self, folder, prefix):
        settings = {"recovery": "partial", "step_seconds": 0.05, "num_steps": 2000}
        time_outs = {"collective_seconds": 10.0}
        options = {"model": "plain", "hands": []}
        super().__init__(folder, options=options, time_outs=time_outs, **settings)
        command = (*LAUNCH, "--nproc", 2, Path(__file__).with_name("watched_job.py"), folder)
        self.process = self.run(*prefix, *command)

    def pid(self, rank):
        return self.events(rank, "step")[-1]["pid"]

    def step(self, rank):
        return max((event["step"] for event in self.events(rank, "step")), default=0)

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
    """What was seen of the job."""
    seen, prefix, nurseries = SimpleNamespace(planted={}, pestered=0), [], [nursery]
    seen.folder = tmp_path_factory.mktemp("job")
    with ExitStack() as stack:
        with suppress(NoNamespacesError):
            network, nurseries = stack.enter_context(hosts(2))
            prefix, seen.address = network.prefix(0), network.address(0)
        watch = stack.enter_context(closing(Watch(seen.folder, prefix)))
        follow(watch, seen, nurseries)
        seen.said = watch.logs()
    return seen


def follow(watch, seen, nurseries):
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
        arguments = (host, port, str(seen.folder / f"executed-{name}"))
        seen.planted[name] = by.ask("wait", by.ask("call", __name__, "plant", *arguments), 100)

    def pester_all():
        places = set().union(*(listening(pid) for pid in watch.by_kind().values()))
        nurseries[0].ask("call", __name__, "pester", [list(place) for place in places])
        seen.pestered += len(places)

    before = watch.step(0)
    pester_all()
    watch.wait_until(lambda: watch.step(0) >= before + 20)
    seen.losses = [event for rank in RANKS for event in watch.events(rank, "peer_lost")]
    victim, seen.pestered = watch.pid(1), 0
    os.kill(victim, signal.SIGKILL)

    def has_recovered():
        with suppress(FileNotFoundError, ProcessLookupError):
            pester_all()
        return watch.pid(1) != victim

    watch.wait_until(has_recovered)
    watch.hurry()
    seen.codes = watch.codes()


def pester(places):
    """Open connections of all kinds to all places; they stay half open for some seconds."""
    kept = []
    for place in places:
        for kind in KINDS:
            with suppress(OSError):
                kept.append(bother(tuple(place), kind, random.Random(1)))
    time.sleep(3.0)


def look_for_the_secret(kinds, seen):
    files = [
        Path(f"/proc/{pid}/{name}") for pid in kinds.values() for name in ("cmdline", "environ")
    ]
    seen.texts = [path.read_text() for path in files]
    environ = Path(f"/proc/{kinds['worker 0']}/environ").read_text()
    path = Path(re.search(r"CPR_JOB_SECRET_FILE=([^\0]*)", environ)[1])
    seen.secret, seen.secret_is_in_memory = path.read_text(), "memfd:" in str(path.readlink())


def test_a_job_outlives_strangers_on_every_port_and_executes_nothing_of_theirs(seen):
    """Neither training nor recovery stops; from another host nothing is reached."""
    assert seen.codes == [0], seen.said
    assert set(seen.planted.values()) == {1}
    assert list(seen.folder.glob("executed-*")) == []
    assert seen.losses == []
    assert seen.pestered > 0
    for path in seen.folder.glob("unpickled"):
        pytest.fail(path.read_text()[:3000])


def test_a_one_machine_job_listens_on_loopback_only_as_security_md_says(seen):
    assert {a for places in seen.ports.values() for a, _ in places} == {"127.0.0.1"}
    table = (ROOT / "SECURITY.md").read_text().split("<!-- listens -->")[1]
    rows = [line.strip("|").split("|")[:2] for line in table.strip().splitlines()[2:]]
    said = {who.strip(): int(ports) for who, ports in rows}
    assert {kind.rstrip(" 01"): len(ports) for kind, ports in seen.ports.items()} == said


def test_the_secret_is_in_the_launchers_memory_and_nowhere_else(seen):
    assert len(seen.secret) == 64
    assert seen.secret_is_in_memory
    for text in (*seen.texts, seen.said):
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
