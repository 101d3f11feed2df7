"""32 workers on eight machines: any one of these is lost, and any two of different groups."""

import itertools
import time

import pytest

from python_tests.distributed.cluster import Cluster
from python_tests.distributed.hosts.oracle import rounds
from python_tests.distributed.hosts.trial import Trial
from python_tests.distributed.namespaces import hosts, or_skipped
from python_tests.helpers import assert_same

MACHINES, SPARES, GROUP = 8, 2, 4
STEPS = 500


@pytest.fixture(scope="module")
def around():
    """The last one has the rendezvous."""
    with or_skipped(), hosts(MACHINES + SPARES + 1) as found:
        yield found


class ManyTrial(Trial):
    """Node ``n`` has the ranks from ``each * n`` on; ``machine_of`` says where it is now."""

    def __init__(self, around, folder, num_nodes, each, step_seconds):
        size = num_nodes * each
        super().__init__(
            around, folder, 1, mode="exact", model="plain", hands=False, world_size=size
        )
        self.each = each
        self.machine_of = list(range(num_nodes))
        self.spares = list(range(MACHINES, MACHINES + SPARES))
        nodes = [rank // each for rank in range(size)]
        self.host_of = dict(enumerate(nodes))
        self.settings |= {
            "num_steps": STEPS, "step_seconds": step_seconds,
            "addresses": {str(r): self.network.address(n) for r, n in enumerate(nodes)},
        }  # fmt: skip
        self.settings["options"] |= {"group_size": GROUP, "parity_hosts": nodes}

    def make_cluster(self):
        by_rank = [self.nurseries[machine] for machine in self.host_of.values()]
        return self.cluster_of(Cluster, by_rank, **self.settings)

    def ranks_of(self, *nodes):
        return sorted(self.each * node + n for node in nodes for n in range(self.each))

    def lose(self, nodes):
        """Cut off the machines of these nodes, which spare machines take."""
        began, left = time.monotonic(), [self.machine_of[node] for node in nodes]
        old = [self.cluster.pids[rank] for rank in self.ranks_of(*nodes)]
        self.killed.update(old)
        for machine in left:
            self.network.cut(machine)
        for node, spare in zip(nodes, self.spares, strict=False):
            self.machine_of[node] = spare
            for rank in self.ranks_of(node):
                self.replace(rank, spare)
        self.wait_until_trained(1)
        print(f"{nodes}: {time.monotonic() - began:.1f} s", flush=True)
        self.spares = [*self.spares[len(nodes) :], *left]
        for machine in left:
            self.network.mend(machine)
        for pid in old:
            code = self.cluster.wait_for_exit(pid, 120)
            self.require(code == 1, f"a worker that was replaced ended with {code}")


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("num_nodes", "each"), [(4, 1), (8, 4)])
def test_any_machine_and_any_two_of_different_groups_may_be_lost(around, tmp_path, num_nodes, each):
    right = ManyTrial(around, tmp_path / "right", num_nodes, each, 0.0).run().finals()
    trial = ManyTrial(around, tmp_path / "hurt", num_nodes, each, 0.05)
    # With eight, groups are on the machines with even, or with odd numbers.
    evens, odds = range(0, num_nodes, 2), range(1, num_nodes, 2)
    pairs = itertools.product(evens, odds) if num_nodes > GROUP else ()
    losses = [*((node,) for node in range(num_nodes)), *pairs]
    trial.faults = {nodes: lambda trial, _, nodes=nodes: trial.lose(nodes) for nodes in losses}
    trial.run(losses)
    assert set(trial.counts) == set(losses)
    later = [recoveries[0] for recoveries in rounds(trial).values()][1:]
    assert [r["lost"] for r in later if r["lost"]] == [trial.ranks_of(*nodes) for nodes in losses]
    assert {r["recovery"] for r in later} == {"exact"}
    assert_same(trial.finals(), right)
