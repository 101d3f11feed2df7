"""Kills at random moments of a deterministic job: equal replicas, an exact account, the same end.

Two hundred of each kind: ``pytest -m long python_tests/distributed/test_random_kills.py``.
"""

import random
import time

import pytest

from python_tests.distributed.mlp_job import DIM, SAMPLES

JOB = ("python_tests.distributed.mlp_job", "DrawingJob")
LAYERS = (DIM, 600, 600, 1)  # two buckets
PARTS, KILLS = 20, 10
WORLD_SIZE = 3
BATCH = WORLD_SIZE * SAMPLES
STEPS_BETWEEN = 5
# Nobody is taken for lost on a busy machine.
PATIENT, WAIT_SECONDS = {"collective_seconds": 60.0, "join_seconds": 120.0}, 120
# So many more are trained behind the last kill.
LAST_STEPS = 40


def make(make_cluster, recovery, *, name="job", num_kills=KILLS):
    return make_cluster(
        name, job=JOB, num_steps=STEPS_BETWEEN * num_kills + LAST_STEPS, world_size=WORLD_SIZE,
        recovery=recovery, whole_steps=True, every_steps=3, time_outs=PATIENT,
        options={"variants": ["plain"], "layers": LAYERS},
    )  # fmt: skip


def strike(cluster, chance, number):
    """Kill one or two, a moment after all have trained a step of the kill's ``number``."""
    victims = chance.sample(list(cluster.ranks), chance.choice([1, 1, 2]))
    wait_for_step(cluster, STEPS_BETWEEN * number + chance.randrange(STEPS_BETWEEN))
    time.sleep(0.1 * chance.random())
    cluster.kill(*victims)
    cluster.wait_for_death(*victims)
    cluster.start(*victims)


def wait_for_step(cluster, step):
    for rank in cluster.ranks:
        cluster.wait_until(lambda rank=rank: cluster.step(rank) >= step, WAIT_SECONDS)


class Fates:
    """Which steps' effects the rows of each worker lost, from what was journalled of the rows."""

    def __init__(self):
        self.lost = [set() for _ in range(WORLD_SIZE)]

    def note_recovery(self, cluster):
        """Returns the samples lost that nobody was told of before, by rank."""
        told = []
        for rank in cluster.ranks:
            events = cluster.events(rank)
            number = max(i for i, e in enumerate(events) if e["event"] == "recovered")
            event, before = events[number], events[:number]
            if before[-1]["pid"] == event["pid"] and before[-2]["event"] == "peer_lost":
                held = before[-2]["step"]
            else:  # its rows say of which step they are
                held = max(
                    (e["step"] for e in before
                     if e["event"] == "trained" and e["tables"] == event["tables"]), default=0,
                )  # fmt: skip
                assert held or event["tables"] == before[2]["tables"], "rows of no step"
            lost = set(range(held + 1, event["step"] + 1))
            told.append(BATCH * len(lost - self.lost[rank]))
            self.lost[rank] |= lost
        return told


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_replicas_are_equal_and_the_account_exact_after_every_kill(make_cluster, part):
    chance, cluster, fates = random.Random(), make(make_cluster, "partial"), Fates()
    cluster.start()
    wait_for_step(cluster, 1)
    for number in range(1, KILLS + 1):
        strike(cluster, chance, number)
        for rank in cluster.ranks:
            cluster.wait_until(
                lambda rank=rank, n=number: len(cluster.recoveries(rank)) == n + 1, WAIT_SECONDS
            )
        told = [cluster.recoveries(rank)[-1]["recovery"]["samples_lost"] for rank in cluster.ranks]
        assert told == [fates.note_recovery(cluster)] * WORLD_SIZE
        wait_for_step(cluster, cluster.recoveries(0)[-1]["step"] + 2)
        since = [since_recovery(cluster, rank) for rank in cluster.ranks]
        for step in set.intersection(*map(set, since)):
            assert since[0][step] == since[1][step] == since[2][step], cluster.logs()
    cluster.finish()
    assert "EnforceNotMet" not in cluster.logs()


def since_recovery(cluster, rank):
    """By step, the replicas of this worker at and after its last recovery."""
    events = [e for e in cluster.events(rank) if e["event"] in ("step", "recovered")]
    last = max(i for i, event in enumerate(events) if event["event"] == "recovered")
    return {event["step"]: event["replicas"] for event in events[last:]}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_full_recovery_repeats_every_step_of_a_run_without_kills(make_cluster, part):
    require_same_steps(make_cluster, KILLS)


def test_full_recovery_repeats_every_step_after_a_few_kills(make_cluster):
    require_same_steps(make_cluster, 3)


def require_same_steps(make_cluster, num_kills):
    """Every step's rows and replicas are those of a run without kills; some strike recoveries."""
    untouched = make(make_cluster, "full", name="untouched", num_kills=num_kills)
    untouched.start()
    untouched.finish(2 * WAIT_SECONDS)
    chance, cluster = random.Random(), make(make_cluster, "full", num_kills=num_kills)
    cluster.start()
    for number in range(1, num_kills + 1):
        strike(cluster, chance, number)
        if chance.random() < 0.2:  # another dies, perhaps while all recover
            time.sleep(chance.random())
            victim = chance.choice(cluster.ranks)
            cluster.kill(victim)
            cluster.wait_for_death(victim)
            cluster.start(victim)
    cluster.finish(2 * WAIT_SECONDS)
    for rank in cluster.ranks:
        right = states_by_step(untouched, rank)
        for event in cluster.events(rank, "step"):
            known = right[event["step"]]
            assert event["tables"] == known["tables"], f"step {event['step']}"
            assert event["replicas"] == known["replicas"], f"step {event['step']}"
        [first, last] = [c.events(rank, "finished")[-1] for c in (untouched, cluster)]
        assert (first["step"], first["tables"]) == (last["step"], last["tables"])
    assert "EnforceNotMet" not in cluster.logs()


def states_by_step(cluster, rank):
    return {event["step"]: event for event in cluster.events(rank, "step")}
