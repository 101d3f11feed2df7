"""A trial whose workers are started by torchrun.

There is a machine more than there are nodes, and on some machines a second agent. So nodes are
adopted.
"""

import os
import signal
import time

from python_tests.distributed.agents import Agents
from python_tests.distributed.cluster import Cluster
from python_tests.distributed.hosts import faults
from python_tests.distributed.hosts.trial import Trial

MADE = ("directory", "port")  # of its own
NUM_RESTARTS = 100
NUM_PARKED = 3  # so that one is left if two machines are cut off
ADOPT_SECONDS = 1
NUM_STEPS = 400


class AgentCluster(Cluster):
    """Of each rank it knows the newest process that has begun."""

    def begin(self, network, num_agents):
        known = {name: value for name, value in vars(self.settings).items() if name not in MADE}
        num_nodes = f"{self.settings.world_size}:{num_agents}"
        endpoint = f"{self.settings.host}:{self.settings.port}"
        self.agents = Agents(
            self.folder, num_nodes, endpoint=endpoint, num_restarts=NUM_RESTARTS, **known
        )
        (self.folder / "secret").write_text(self.settings.secret)
        self.network, self.agent_of = network, {}
        self.host_of_agent, self.agent_in = {}, []
        for host in (*range(num_agents), *range(NUM_PARKED)):
            self.agent_in.append(self.start_agent(host))

    def start_agent(self, host):
        prefix = self.network.prefix(host)
        process = self.agents.start(prefix=prefix, adopt_after=ADOPT_SECONDS)
        self.host_of_agent[process.pid] = host
        return process

    def look(self):
        """Return the host of each rank whose worker has begun."""
        found = {}
        for rank in self.ranks:
            if begun := self.events(rank, "began"):
                self.pids[rank] = begun[-1]["pid"]
                self.agent_of[rank] = begun[-1]["parent"]
                found[rank] = self.host_of_agent[begun[-1]["parent"]]
        return found

    def diagnosis(self):
        return self.agents.logs() + self.logs()

    def close(self):
        self.agents.close()
        super().close()


def agent_killed(trial, rank):
    """With its worker: the kernel ends that."""
    trial.killed.add(trial.cluster.pids[rank])
    os.kill(trial.agent_of(rank), signal.SIGKILL)
    trial.ended_agents.add(trial.agent_of(rank))


def agent_asked_to_end(trial, rank):
    trial.asked.add(trial.cluster.pids[rank])
    os.kill(trial.agent_of(rank), signal.SIGTERM)
    trial.ended_agents.add(trial.agent_of(rank))


def machine_cut_off(trial, rank):
    """Without a word; a standby has its node, and it returns."""
    trial.cut_off(trial.host_of[rank])
    trial.wait_until_trained()
    trial.mend_all()


def machine_cut_off_and_all_that_stand_by(trial, rank):
    """Another machine adopts its node."""
    idle = set(range(trial.world_size + 1)) - set(trial.host_of.values())
    for host in idle:
        trial.cut_off(host)
    time.sleep(5.0 if idle else 0.0)
    trial.cut_off(trial.host_of[rank])
    trial.wait_until_trained()
    trial.mend_all()


def ends_its_agent(trial, rank):
    """torchrun takes code 0 for success."""
    trial.ended_agents.add(trial.agent_of(rank))
    faults.FAULTS["exit(0)"](trial, rank)


FAULTS = {
    **{
        name: faults.FAULTS[name]
        for name in (
            *("KILL", "SEGV", "exception", "KILL at a point", "SIGTERM", "leave()"),
            *("short hang", "short cut", "slow link", "rendezvous killed"),
        )
    },
    "exit(0)": ends_its_agent, "agent KILL": agent_killed, "agent SIGTERM": agent_asked_to_end,
    "machine cut off": machine_cut_off,
    "machine cut off, others stand by no more": machine_cut_off_and_all_that_stand_by,
}  # fmt: skip


class AgentTrial(Trial):
    def __init__(self, around, folder, seed, **options):
        super().__init__(around, folder, seed, world_size=len(around[1]) - 2, **options)
        self.faults = FAULTS
        self.settings["num_steps"] = NUM_STEPS
        self.ended_agents, self.is_cut_off = set(), set()

    def make_cluster(self):
        settings = {**self.settings, "addresses": {}}
        cluster = self.cluster_of(AgentCluster, self.nurseries[:-1], **settings)
        cluster.start = lambda: cluster.begin(self.network, self.world_size + 1)
        return cluster

    def agent_of(self, rank):
        return self.cluster.agent_of[rank]

    def cut_off(self, host):
        """Its workers end once they can hear that they were replaced."""
        self.host_of |= self.cluster.look()
        self.killed |= {self.cluster.pids[r] for r, where in self.host_of.items() if where == host}
        self.is_cut_off.add(host)
        self.network.cut(host)

    def mend_all(self):
        while self.is_cut_off:
            self.network.mend(self.is_cut_off.pop())

    def supervise(self):
        """Start again agents that a fault has ended; workers are theirs to start."""
        self.host_of |= self.cluster.look()
        for place, process in enumerate(self.cluster.agent_in):
            code, host = process.poll(), self.cluster.host_of_agent[process.pid]
            if code is None or (code == 0 and self.is_over()):
                continue
            is_known = process.pid in self.ended_agents
            self.require(is_known, f"the agent on host {host} ended with {code}: nobody caused it")
            self.cluster.agent_in[place] = self.cluster.start_agent(host)
        for rank in self.cluster.ranks:
            for event in self.cluster.events(rank, "began")[:-1]:
                self.require_cause(rank, event["pid"])

    def logs(self, rank):
        return "\n".join(log.read_text() for log in self.folder.glob("agent-*.log"))
