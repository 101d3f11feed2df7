"""Many losses, at random moments and of random workers, in one job."""

import random
import signal

import pytest

LOSSES = 30


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
