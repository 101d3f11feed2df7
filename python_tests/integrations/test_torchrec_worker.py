"""Every plan of TorchRec, in workers that outlive each other."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from python_tests.distributed.cluster import Cluster
from python_tests.distributed.test_kills import EXACT, survive
from python_tests.distributed.test_replicas import require_equal_replicas
from python_tests.integrations.planned_job import REPLICATED
from python_tests.integrations.sharded_models import SAMPLES

JOB = "python_tests.integrations.planned_job"


@pytest.fixture
def make_cluster(torchrec_nursery, tmp_path):
    clusters = []

    def make(plan, world_size, *, hosts=1, **settings):
        clusters.append(Cluster(
            [torchrec_nursery], tmp_path, job=(JOB, "PlannedJob"), batch_size=world_size * SAMPLES,
            world_size=world_size, num_steps=10_000, options={"plan": plan, "hosts": hosts},
            **EXACT, **settings,
        ))  # fmt: skip
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


@pytest.mark.parametrize(
    ("plan", "world_size"),
    [("row_wise", 2), ("column_wise", 3), ("table_wise", 4), ("mixed", 3)],
)
def test_replicas_are_equal_and_rows_come_back_under_every_plan(make_cluster, plan, world_size):
    """One worker dies in each of its first lives; then another one, and its rows are compared."""
    victim, moments = world_size - 1, ("backward", "reduced", "forward", "committing")
    deaths = {str(life): [where, 6 * life] for life, where in enumerate(moments, start=1)}
    cluster = make_cluster(plan, world_size, suicides={str(victim): deaths})
    cluster.start()
    for _ in moments:
        cluster.wait_for_death(victim)
        cluster.start(victim)
    cluster.wait_until(lambda: len(cluster.recoveries(0)) == 1 + len(moments))
    survive(cluster, 0)
    require_equal_replicas(cluster)
    require_replicated_table(cluster)


def test_workers_of_two_hosts_outlive_each_other_under_a_table_row_wise_plan(make_cluster):
    cluster = make_cluster("table_row_wise", 4, hosts=2)
    cluster.start()
    survive(cluster, 0, 2)  # one of each host
    survive(cluster, 3, ruin=True)
    require_equal_replicas(cluster)
    require_replicated_table(cluster)
    for rank in cluster.ranks:
        assert parts_of(cluster, rank) == {rank // 2}


def require_replicated_table(cluster):
    assert f"bags.embedding_bags.{REPLICATED}.weight" in cluster.recoveries(0)[-1]["replicas"]


def parts_of(cluster, rank):
    """The hosts whose pooled tables this worker holds rows of."""
    [store] = Path(cluster.settings.directory, "stores").glob(
        f"worker-{rank:05d}-of-*/MANIFEST.json"
    )
    names = json.loads(store.read_text())["content"]["model"]["tables"]
    pooled = [name.split(".")[2] for name in names if name.startswith("bags.")]
    return {"abcd".index(name[0]) % 2 for name in pooled}
