"""One job on hosts of its own, some faults, and what is wrong in the end."""

import os
import random
import shutil
import signal
import time
from importlib.util import find_spec
from pathlib import Path

from cpr_ext.runtime.termination import EXIT_CODE
from python_tests.distributed.cluster import Cluster
from python_tests.distributed.hosts.fate_job import JOBS, MODES
from python_tests.distributed.hosts.faults import FAULTS
from python_tests.distributed.hosts.oracle import violations

MODELS = ["plain", "stateful", *(["torchrec"] if find_spec("torchrec") else [])]
TIME_OUTS = {
    "collective_seconds": 3.0, "join_seconds": 150.0, "heartbeat_seconds": 0.5,
    "identity_seconds": 10.0,
}  # fmt: skip
NUM_STEPS, STEP_SECONDS = 160, 0.03
PATIENCE_SECONDS = 180.0
BUGS = ("AssertionError", "ProtocolError", "WorkersDifferError", "DamageError", "KeyError")


class ViolationError(Exception):
    """The job did what it must never do."""


class Trial:
    """Args:
    around: a network and a nursery on each of its hosts, as ``namespaces.hosts`` gives them;
        the rendezvous is on the last one.
    mode, model, hands: by chance if they are None.
    """

    def __init__(self, around, folder, seed, *, mode=None, model=None, hands=None, world_size=None):
        self.network, self.nurseries = around
        self.folder, self.chance = Path(folder), random.Random(seed)
        self.world_size = world_size or len(self.nurseries) - 1
        self.faults = FAULTS
        self.mode = mode or self.chance.choice(list(MODES))
        model = model or self.chance.choice(MODELS)
        if hands is None:
            hands = self.chance.random() < 0.4 and model != "torchrec"
        self.hands = [[1, 30], [0, 70]] if hands else []
        self.host_of = {rank: rank for rank in range(self.world_size)}
        self.serve = None  # what the rendezvous' host runs, if not the right one
        self.stores_of = {}  # of ranks that have another disk by now
        self.life_of = dict.fromkeys(range(self.world_size), 1)
        self.killed = set()  # processes that a fault has killed
        self.asked = set()  # and those that it has asked to end
        self.happened = "the start"
        self.counts = {}
        self.seconds = []
        self.loop = self.chance.choice(["run", "own"])
        recovery, parity = MODES[self.mode]
        options = {"model": model, "hands": self.hands, "loop": self.loop}
        if parity is not None:
            options |= {"group_size": self.world_size, **parity}
        self.settings = {
            "job": JOBS[model], "world_size": self.world_size, "num_steps": NUM_STEPS,
            "step_seconds": STEP_SECONDS, "recovery": recovery, "options": options,
            "digests": False,
            "host": self.network.address(len(self.nurseries) - 1), "time_outs": TIME_OUTS,
            "addresses": {str(r): self.network.address(r) for r in range(self.world_size)},
        }  # fmt: skip

    def key(self):
        """What decides how the job ends without faults."""
        options = self.settings["options"]
        return self.world_size, options["model"], str(self.hands), self.settings["num_steps"]

    def run(self, faults=(), num_faults=0):
        """Run the job to its end; raises ViolationError if it does not come."""
        self.cluster = self.make_cluster()
        try:
            self.cluster.start()
            self.wait_until_trained()
            for name in [*faults, *self.chance.choices(list(self.faults), k=num_faults)]:
                if self.is_over():
                    break
                self.counts[name] = self.counts.get(name, 0) + 1
                self.happened = name
                self.faults[name](self, self.chance.randrange(self.world_size))
                self.wait_until_trained()
            self.wait_for(self.has_ended, "the end")
            return self
        finally:
            self.cluster.close()

    def make_cluster(self):
        if self.settings["options"]["model"] == "torchrec":
            for nursery in self.nurseries[:-1]:  # imported once, not in every worker
                done = nursery.ask("call", JOBS["torchrec"][0], "imported")
                assert nursery.ask("wait", done, 60) == 0
        return self.cluster_of(Cluster, self.nurseries[:-1], **self.settings)

    def cluster_of(self, kind, nurseries, **settings):
        meeting = self.nurseries[-1]
        return kind(nurseries, self.folder, meeting=meeting, serve=self.serve, **settings)

    def wrong(self, right):
        return violations(self, right)

    def finals(self):
        return self.cluster.finals()

    def another_host(self, rank):
        others = [host for host in range(self.world_size) if host != self.host_of[rank]]
        return self.chance.choice(others)

    def replace(self, rank, host, stores=None):
        """Start a process of this rank on another host; the one before lives."""
        self.host_of[rank] = host
        if stores is not None:
            self.stores_of[rank] = stores
        self._start_again(rank)

    def start_on(self, rank, host, **changed):
        addresses = {**self.settings["addresses"], str(rank): self.network.address(host)}
        return self.cluster.start_another(
            rank, self.nurseries[host], addresses=addresses, **changed
        )

    def end(self, pid):
        if self.cluster.wait_for_exit(pid, 0) is None:
            os.kill(pid, signal.SIGKILL)
            self.cluster.wait_for_exit(pid, 10)

    def supervise(self):
        """Start again who has died; as `cpr launch` does, unless another has its rank."""
        for rank, pid in list(self.cluster.pids.items()):
            code = self.cluster.wait_for_exit(pid, 0)
            if code is None or (code == 0 and self.is_done(rank)):
                continue
            for bug in BUGS:
                self.require(f"{bug}:" not in self.logs(rank), f"worker {rank}: {bug}")
            self.require_cause(rank, pid, code)
            is_out = "was replaced while" in self.last_log(rank)
            self.require(not is_out, f"worker {rank} was refused, and nobody has its place")
            self._start_again(rank)

    def require_cause(self, rank, pid, code=None):
        """That a process has ended as a fault had it end; its code is None if nobody knows it."""
        obeyed = [e["what"] for e in self.cluster.events(rank, "obeys") if e["pid"] == pid]
        if pid in self.killed or (obeyed and obeyed[-1] != "leave"):
            return
        has_left = obeyed or pid in self.asked
        self.require(has_left, f"worker {rank} ended with {code}, and nobody had caused that")
        self.require(code in (EXIT_CODE, None), f"worker {rank} was to leave, ended with {code}")

    def _start_again(self, rank):
        changed = {"stores": self.stores_of[rank]} if rank in self.stores_of else {}
        self.cluster.pids[rank] = self.start_on(rank, self.host_of[rank], **changed)
        self.life_of[rank] = self.cluster.life(rank)

    def is_done(self, rank):
        events = self.cluster.events(rank, "ended")
        return any(event["pid"] == self.cluster.pids[rank] for event in events)

    def is_over(self):
        return any(self.cluster.events(rank, "ended") for rank in range(self.world_size))

    def has_ended(self):
        return all((self.folder / f"final-{r}.pt").exists() for r in range(self.world_size)) or all(
            self.is_done(rank) for rank in range(self.world_size)
        )

    def wait_until_trained(self, steps=3):
        """Until each worker has trained some steps from now on, or the job is over."""
        before = {rank: self.num_trained(rank) for rank in range(self.world_size)}
        began = time.monotonic()
        self.wait_for(
            lambda: (
                self.is_over() or all(self.num_trained(r) >= n + steps for r, n in before.items())
            ),
            "steps",
        )
        self.seconds.append(time.monotonic() - began)

    def num_trained(self, rank):
        return len(self.cluster.events(rank, "step"))

    def wait_for(self, is_so, what):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            self.supervise()
            self.require(time.monotonic() < deadline, f"waited {PATIENCE_SECONDS:g} s for {what}")
            time.sleep(0.05)

    def pass_time(self, least, most):
        time.sleep(self.chance.uniform(least, most))

    def require(self, is_so, what):
        if not is_so:
            raise ViolationError(f"{what}\n{self.cluster.diagnosis()}")

    def logs(self, rank):
        paths = sorted(self.folder.glob(f"log-{rank}-*"), key=lambda path: path.stat().st_mtime)
        return "\n".join(path.read_text() for path in paths)

    def last_log(self, rank):
        """Of the process that has this rank."""
        return (self.folder / f"log-{rank}-{self.life_of[rank]}").read_text()

    def forget(self):
        shutil.rmtree(self.folder, ignore_errors=True)


class Finals:
    """How jobs end without faults, by what decides it."""

    def __init__(self, around, folder):
        self._around, self._folder = around, Path(folder)
        self._known = {}

    def of(self, trial):
        key = trial.key()
        if key not in self._known:
            folder = self._folder / f"right-{len(self._known)}"
            size = trial.world_size
            right = Trial(
                self._around, folder, 0, mode=trial.mode, model=key[1], hands=bool(trial.hands),
                world_size=size,
            )  # fmt: skip
            right.settings["options"] = {**trial.settings["options"]}
            right.settings |= {"step_seconds": 0.0, "num_steps": trial.settings["num_steps"]}
            self._known[key] = right.run().finals()
        return self._known[key]
