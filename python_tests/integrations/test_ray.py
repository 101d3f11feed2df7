"""A job of actors on a real Ray cluster: a node is killed, and the job ends in the same bits."""

import importlib
import os
import sys
import threading
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORKERS, STEPS = 2, 300
KILL_AFTER_SECONDS = 4


class Killer:
    """Kills the node of worker 1, some time after it began; that of no later one."""

    def __init__(self, nodes):
        self.by_id = {node.node_id: node for node in nodes}
        self.starts = []

    def __call__(self, rank, node):
        self.starts.append(rank)
        if self.starts.count(1) == rank == 1:
            kill = threading.Timer(KILL_AFTER_SECONDS, self.by_id[node].kill_raylet)
            kill.daemon = True
            kill.start()


@pytest.fixture
def nodes():
    """A cluster's head without processors, and nodes for a worker each, one more than needed."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        found = [cluster.add_node(num_cpus=1) for _ in range(WORKERS + 1)]
        # As for a script, whose own folder the actors have on their path.
        path = os.pathsep.join([str(EXAMPLES), *sys.path])
        ray.init(address=cluster.address, runtime_env={"env_vars": {"PYTHONPATH": path}})
        yield found
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_worker_of_a_lost_node_starts_on_another_and_nothing_is_lost(
    tmp_path, monkeypatch, nodes
):
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("ray_workers")
    undisturbed = example.train(WORKERS, str(tmp_path / "right"), STEPS)
    killer = Killer(nodes)
    hurt = example.train(WORKERS, str(tmp_path / "hurt"), STEPS, killer)
    assert sorted(killer.starts) == [0, 1, 1]
    assert hurt == undisturbed
    sys.modules.pop("ray_workers")
