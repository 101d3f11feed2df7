"""A trial whose workers are started by torchrun, with an agent more than there are nodes."""

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path

from python_tests.distributed.agents import Agents
from python_tests.distributed.hosts import faults
from python_tests.distributed.hosts.trial import HostsCluster, Trial

WORKER = Path(__file__).with_name("agent_worker.py")
NUM_RESTARTS = 100


class AgentCluster(HostsCluster):
    """Of each rank it knows the newest process that has begun."""

    def begin(self, network, num_agents):
        folder = Path(self.settings.directory)
        (folder / "settings").write_text(json.dumps(asdict(self.settings)))
        nodes = f"{self.settings.world_size}:{num_agents}"
        endpoint = f"{self.settings.host}:{self.settings.port}"
        self.agents = Agents(
            folder, nodes, WORKER, folder, endpoint=endpoint, num_restarts=NUM_RESTARTS
        )
        (folder / "secret").write_text(self.settings.secret)
        self.network, self.host_of_agent = network, {}
        for host in range(num_agents):
            self.start_agent(host)

    def start_agent(self, host):
        process = self.agents.start(prefix=["ip", "netns", "exec", self.network.name(host)])
        self.host_of_agent[process.pid] = host

    def look(self):
        """Return the host of each rank whose worker has begun."""
        found = {}
        for rank in self.ranks:
            if begun := self.events(rank, "began"):
                self.pids[rank] = begun[-1]["pid"]
                found[rank] = self.host_of_agent[begun[-1]["parent"]]
        return found

    def agent_on(self, host):
        """The newest one there."""
        return [pid for pid, where in self.host_of_agent.items() if where == host][-1]

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
    host = trial.host_of[rank]
    trial.killed.add(trial.cluster.pids[rank])  # its worker ends once it can hear that
    trial.network.cut(host)
    trial.wait_until_trained()
    trial.network.mend(host)


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
}  # fmt: skip


class AgentTrial(Trial):
    def __init__(self, around, folder, seed, **options):
        super().__init__(around, folder, seed, world_size=len(around[1]) - 2, **options)
        self.faults = FAULTS
        self.ended_agents = set()

    def make_cluster(self):
        settings = {**self.settings, "addresses": {}}
        cluster = AgentCluster(self.nurseries[:-1], self.nurseries[-1], self.folder, **settings)
        cluster.start = lambda: cluster.begin(self.network, self.world_size + 1)
        return cluster

    def agent_of(self, rank):
        return self.cluster.agent_on(self.host_of[rank])

    def supervise(self):
        """Start again agents that a fault has ended; workers are theirs to start."""
        self.host_of |= self.cluster.look()
        for process in list(self.cluster.agents.processes):
            code, host = process.poll(), self.cluster.host_of_agent[process.pid]
            if code is None or process.pid != self.cluster.agent_on(host):
                continue
            if code == 0 and self.is_over():
                continue
            is_known = process.pid in self.ended_agents
            self.require(is_known, f"the agent on host {host} ended with {code}: nobody caused it")
            self.cluster.start_agent(host)
        for rank in self.cluster.ranks:
            for event in self.cluster.events(rank, "began")[:-1]:
                self.require_cause(rank, event["pid"])

    def logs(self, rank):
        return "\n".join(log.read_text() for log in self.folder.glob("agent-*.log"))
