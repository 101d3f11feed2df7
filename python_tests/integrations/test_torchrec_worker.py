"""Plans that make process groups of their own, in workers that outlive each other."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from python_tests.distributed.cluster import Cluster, Nursery
from python_tests.distributed.test_kills import EXACT, survive
from python_tests.distributed.test_replicas import require_equal_replicas
from python_tests.integrations.sharded_models import SAMPLES
from python_tests.integrations.table_row_wise_job import REPLICATED

JOB = "python_tests.integrations.table_row_wise_job"


@pytest.fixture
def nursery():
    nursery = Nursery()
    nursery.ask("wait", nursery.ask("call", JOB, "imported"), 10)
    yield nursery
    nursery.close()


def test_workers_of_two_hosts_outlive_each_other_under_a_table_row_wise_plan(nursery, tmp_path):
    cluster = Cluster(
        [nursery], tmp_path, job=(JOB, "TableRowWiseJob"), batch_size=4 * SAMPLES,
        num_steps=10_000, **EXACT,
    )  # fmt: skip
    try:
        cluster.start()
        survive(cluster, 0, 2)  # one of each host
        survive(cluster, 3, ruin=True)
        require_equal_replicas(cluster)
        assert f"bags.embedding_bags.{REPLICATED}.weight" in cluster.recoveries(0)[-1]["replicas"]
        for rank in cluster.ranks:
            assert parts_of(cluster, rank) == {rank // 2}
    finally:
        cluster.close()


def parts_of(cluster, rank):
    """The hosts whose pooled tables this worker holds rows of."""
    [store] = Path(cluster.settings.directory, "stores").glob(f"worker-{rank:05d}-of-*/STORE.json")
    names = json.loads(store.read_text())["content"]["tables"]
    return {"abcd".index(name.split(".")[2][0]) % 2 for name in names}
