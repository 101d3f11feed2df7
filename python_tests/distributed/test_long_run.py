"""Many losses, at random moments and of random workers, in one job."""

import random
import signal
import time

import pytest

from python_tests.distributed.mlp_job import SEVERAL_BUCKETS

LOSSES = 30
KILLS = 100


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_outlives_thirty_losses_at_random_moments(make_cluster):
    chance = random.Random()
    cluster = make_cluster(
        num_steps=100_000, step_seconds=0.003, every_steps=7, time_outs={"collective_seconds": 3.0}
    )
    cluster.start()
    cluster.wait_for_step(3)
    for _ in range(LOSSES):
        victims = chance.sample(list(cluster.ranks), chance.choice([1, 1, 1, 2, 4]))
        seen = max(len(cluster.recoveries(rank)) for rank in cluster.ranks)
        if chance.random() < 0.2:
            cluster.kill(victims[0], with_signal=signal.SIGSTOP)
            cluster.wait_until(
                lambda seen=seen: any(len(cluster.events(r, "peer_lost")) for r in cluster.ranks)
            )
        cluster.kill(*victims)
        cluster.wait_for_death(*victims)
        cluster.start(*victims)
        if chance.random() < 0.3:
            continue  # the next one strikes while they recover
        cluster.wait_until(
            lambda seen=seen: (
                all(len(cluster.recoveries(r)) > 0 for r in cluster.ranks)
                and max(len(cluster.recoveries(r)) for r in cluster.ranks) > seen
            ),
            60,
        )
        at = max(cluster.step(rank) for rank in cluster.ranks)
        cluster.wait_for_step(at + chance.randrange(40), *cluster.ranks)
    at = max(cluster.step(rank) for rank in cluster.ranks)
    cluster.wait_for_step(at + 50)
    ends = {cluster.events(rank, "step")[-1]["step"] for rank in cluster.ranks}
    assert max(ends) - min(ends) <= 2


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_replicas_are_equal_after_a_hundred_kills_at_random_moments(make_cluster):
    chance = random.Random()
    cluster = make_cluster(
        job=("python_tests.distributed.mlp_job", "MlpJob"), num_steps=1_000_000, world_size=3,
        every_steps=3, options={"variants": ["plain", "static_graph"], "layers": SEVERAL_BUCKETS},
    )  # fmt: skip
    cluster.start()
    for _ in range(KILLS):
        victims = chance.sample(list(cluster.ranks), chance.choice([1, 1, 2]))
        cluster.wait_for_step(max(cluster.step(rank) for rank in cluster.ranks) + 2)
        time.sleep(0.1 * chance.random())
        cluster.kill(*victims)
        cluster.wait_for_death(*victims)
        before = {rank: len(cluster.recoveries(rank)) for rank in cluster.ranks}
        cluster.start(*victims)
        for rank in cluster.ranks:
            known = before[rank]
            cluster.wait_until(lambda r=rank, n=known: len(cluster.recoveries(r)) > n)
        cluster.wait_for_step(cluster.recoveries(0)[-1]["step"] + 2)
        since = [since_recovery(cluster, rank) for rank in cluster.ranks]
        for step in set.intersection(*map(set, since)):
            assert since[0][step] == since[1][step] == since[2][step], cluster.logs()
    assert "EnforceNotMet" not in cluster.logs()


def since_recovery(cluster, rank):
    """By step, the replicas of this worker at and after its last recovery."""
    events = [e for e in cluster.events(rank) if e["event"] in ("step", "recovered")]
    last = max(i for i, event in enumerate(events) if event["event"] == "recovered")
    return {event["step"]: event["replicas"] for event in events[last:]}
