"""Exact recovery of TorchRec's managed collisions: a killed worker's ids are rebuilt with rows."""

import random
import signal
import time

import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from python_tests.distributed.cluster import Cluster
from python_tests.distributed.parity.test_exact_recovery import (
    WAIT_SECONDS,
    is_rebuilt,
    newest_step,
)
from python_tests.integrations.managed_job import SAMPLES
from python_tests.integrations.test_torchrec_parity import PATIENT, states

JOB = ("python_tests.integrations.managed_worker_job", "ManagedWorkerJob")
STEPS = 16


@pytest.fixture
def make_cluster(torchrec_nursery, tmp_path):
    clusters = []

    def make(name, world_size=2, policy="lru", num_steps=STEPS, **settings):
        clusters.append(Cluster(
            [torchrec_nursery], tmp_path / name, job=JOB, batch_size=world_size * SAMPLES,
            world_size=world_size, num_steps=num_steps, recovery="exact",
            every_steps=4, time_outs=PATIENT,
            options={"policy": policy, "group_size": world_size}, **settings,
        ))  # fmt: skip
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


def require_equal(killed, untouched, num_steps=STEPS):
    """Rows, ids, counts, and what waits for the next eviction, at each step that is known."""
    found, expected = states(killed), states(untouched)
    assert found == {at: known for at, known in expected.items() if at in found}
    assert all((rank, num_steps) in found for rank in killed.ranks)
    for recovery in (event["recovery"] for event in killed.recoveries(0)[1:]):
        assert (recovery["recovery"], recovery["obstacle"]) == ("exact", "")
        assert set(recovery["samples_lost"]) == set(recovery["bytes_read"]) == {0}


@pytest.mark.parametrize(
    ("world_size", "policy", "rebuild_rate"),
    [
        (2, "lru", None),
        (3, "distance", 1),
        pytest.param(2, "lfu", 1, marks=pytest.mark.long),
        pytest.param(4, "lru", None, marks=pytest.mark.long),
    ],
)
def test_killed_workers_have_the_same_ids_again(make_cluster, world_size, policy, rebuild_rate):
    """One dies in the forward pass in which ids are evicted; then another, after its backward."""
    untouched = make_cluster("untouched", world_size, policy)
    untouched.start()
    suicides = {"1": {"1": ["forward", 8]}, "0": {"1": ["reduced", 12]}}
    killed = make_cluster("killed", world_size, policy, suicides=suicides)
    killed.settings.options["rebuild_rate"] = rebuild_rate
    killed.start()
    for victim in (1, 0):
        killed.wait_for_death(victim, seconds=WAIT_SECONDS)
        killed.start(victim)
    for cluster in (untouched, killed):
        cluster.finish(WAIT_SECONDS)
    require_equal(killed, untouched)
    assert [event["recovery"]["lost"] for event in killed.recoveries(1)[1:]] == [[1], [0]]
    ids = {rank: set() for rank in untouched.ranks}
    for (rank, _), (_, replicas) in states(untouched).items():
        ids[rank].add(replicas["a/ids"][0])
    assert min(map(len, ids.values())) > 2, ids  # maps have changed; by counts, the least


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_kills_at_random_moments_cost_nothing(make_cluster, world_size):
    chance, steps, kills = random.Random(), 60, 5
    untouched = make_cluster("untouched", world_size, num_steps=steps)
    untouched.start()
    untouched.finish(WAIT_SECONDS)
    killed = make_cluster("killed", world_size, num_steps=steps)
    killed.start()
    for moment in sorted(chance.sample(range(1, steps - 5), kills)):
        killed.wait_until(lambda moment=moment: newest_step(killed) >= moment, WAIT_SECONDS)
        victim = chance.choice(killed.ranks)
        time.sleep(0.1 * chance.random())
        if killed.exit_code(victim, 0) is None:
            killed.kill(victim)
            if killed.exit_code(victim, WAIT_SECONDS) == -signal.SIGKILL:
                killed.start(victim)
                killed.wait_until(lambda rank=victim: is_rebuilt(killed, rank), WAIT_SECONDS)
    killed.finish(WAIT_SECONDS)
    require_equal(killed, untouched, steps)
