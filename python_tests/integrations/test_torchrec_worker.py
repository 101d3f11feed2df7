"""Every plan of TorchRec, and its managed collisions, in workers that outlive each other."""

import json

import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from python_tests.distributed.cluster import PATIENT
from python_tests.distributed.losses import kill_at_random, long, require_nothing_lost
from python_tests.distributed.test_kills import EXACT, require_equal_replicas, survive
from python_tests.integrations import managed_job, planned_job, sharded_models

MOMENTS = ("backward", "reduced", "forward", "committing")
# In the pass in which rows, or ids, change; then another worker, after it.
ROWS_CHANGE = {1: [["backward", 3]], 0: [["reduced", 6]]}
IDS_CHANGE = {1: [["forward", 8]], 0: [["reduced", 12]]}


def settings_of(world_size=2, *, num_steps=9, **options):
    """Of a job with parity; by ``policy`` one with managed collisions."""
    kind = "ManagedWorkerJob" if "policy" in options else "PlannedJob"
    samples = (managed_job if "policy" in options else sharded_models).SAMPLES
    return {
        "job": (planned_job.__name__, kind), "world_size": world_size, "recovery": "exact",
        "batch_size": world_size * samples, "num_steps": num_steps, "every_steps": 4,
        "time_outs": PATIENT, "options": {"group_size": world_size, **options},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "world_size", "hosts"),
    [
        ("row_wise", 2, 1),
        ("column_wise", 3, 1),
        ("table_wise", 4, 1),
        ("mixed", 3, 1),
        ("table_row_wise", 4, 2),
    ],
)
def test_replicas_are_equal_and_rows_come_back_under_every_plan(
    make_cluster, plan, world_size, hosts
):
    """One worker dies in each of its first lives; then others, and their rows are compared."""
    deaths = [[where, 6 * life] for life, where in enumerate(MOMENTS, start=1)]
    settings = {**settings_of(world_size), **EXACT, "recovery": "partial"}
    settings["options"] = {"plan": plan, "hosts": hosts}  # without parity
    cluster = make_cluster(deaths={world_size - 1: deaths}, **settings)
    cluster.start()
    cluster.restart_the_dead()
    cluster.wait_for_recovery(1 + len(MOMENTS))
    survive(cluster, *range(0, world_size, world_size // hosts), ruin=hosts > 1)
    require_equal_replicas(cluster)
    replicated = f"bags.embedding_bags.{planned_job.REPLICATED}.weight"
    assert replicated in cluster.recovered(0)[-1]["replicas"]
    for rank in cluster.ranks if hosts > 1 else ():
        assert parts_of(cluster, rank) == {rank // hosts}


def parts_of(cluster, rank):
    """The hosts whose pooled tables this worker holds rows of."""
    [store] = cluster.stores.glob(f"worker-{rank:05d}-of-*/MANIFEST.json")
    names = json.loads(store.read_text())["content"]["model"]["tables"]
    pooled = [name.split(".")[2] for name in names if name.startswith("bags.")]
    return {"abcd".index(name[0]) % 2 for name in pooled}


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {"plan": "row_wise"}),
        (2, {"plan": "column_wise"}),
        (2, {"plan": "table_wise", "rebuild_rate": 1}),
        long(2, {"plan": "table_wise"}),
        long(2, {"plan": "row_wise", "rebuild_rate": 1}),
        long(2, {"plan": "column_wise", "rebuild_rate": 1}),
        (2, {"policy": "lru"}),
        (3, {"policy": "distance", "rebuild_rate": 1}),
        long(2, {"policy": "lfu", "rebuild_rate": 1}),
        long(4, {"policy": "lru"}),
    ],
)
def test_killed_workers_cost_nothing(make_cluster, untouched, world_size, options):
    """Their ids, counts, and what waits for the next eviction are the same again, too."""
    is_keyed = "policy" in options
    settings = settings_of(world_size, num_steps=16 if is_keyed else 9, **options)
    cluster = make_cluster(deaths=IDS_CHANGE if is_keyed else ROWS_CHANGE, **settings)
    expected = untouched(settings)
    require_nothing_lost(cluster, expected)
    assert cluster.lost(1)[1:] == [[1], [0]]
    # Steps were trained while rows were missing, if they are rebuilt during training.
    is_late = any("tables" not in e for rank in (0, 1) for e in cluster.events(rank, "step"))
    assert is_late == ("rebuild_rate" in options)
    for rank in cluster.ranks if is_keyed else ():
        maps = {replicas["a/ids"][0] for (r, _), (_, replicas) in expected.items() if r == rank}
        assert len(maps) > 2  # by counts, the least


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_kills_at_random_moments_cost_nothing(make_cluster, untouched, world_size):
    settings = settings_of(world_size, num_steps=60, policy="lru")
    kill_at_random(make_cluster(**settings), untouched(settings), 5)
