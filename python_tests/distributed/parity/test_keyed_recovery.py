"""Workers with keyed tables and parity are killed while ids are evicted: nothing differs after."""

import random
import signal
import time

import pytest

from python_tests.distributed.cluster import Cluster
from python_tests.distributed.mlp_job import ROWS
from python_tests.distributed.parity.test_exact_recovery import (
    WAIT_SECONDS,
    is_rebuilt,
    last_recovery,
    long,
    newest_step,
    require_nothing_lost,
    require_states,
    run,
    settings_of,
    states,
)

JOB = ("python_tests.distributed.parity.keyed_parity_job", "KeyedParityJob")
STEPS = 12  # ids are evicted from the fifth on


@pytest.fixture(scope="session")
def right_states(nursery, tmp_path_factory):
    """Those of a job without kills, by its shape and steps."""
    known = {}

    def of(shape, num_steps=STEPS):
        if (shape, num_steps) not in known:
            folder = tmp_path_factory.mktemp("untouched")
            settings = settings_of(shape, job=JOB, num_steps=num_steps)
            cluster = Cluster([nursery], folder, **settings)
            run(cluster)
            known[shape, num_steps] = states(cluster)
        return known[shape, num_steps]

    return of


def evictions(expected):
    """The ids that were in a map at one step and not at the next."""
    held = {at: {key for key, _ in replicas["map"][0]} for at, (_, replicas) in expected.items()}
    assert max(map(len, held.values())) == ROWS
    return sum(len(held[rank, step] - held.get((rank, step + 1), set())) for rank, step in held)


@pytest.mark.parametrize(
    ("shape", "lives"),
    [
        ("mirror", {"1": ["optimizer", 8]}),
        ("three", {"1": ["before the acknowledgement", 9], "2": ["decode", 0]}),
        long("mirror", {"1": ["forward", 8]}),
        long("three", {"1": ["between two holders", 9]}),
        long("four", {"1": ["before the delta", 8], "2": ["encode", 0]}),
    ],
)
def test_a_killed_worker_has_the_same_ids_and_rows_again(make_cluster, right_states, shape, lives):
    expected = right_states(shape)
    assert evictions(expected) > 4 * ROWS
    settings = settings_of(shape, job=JOB, num_steps=STEPS, suicides={"1": lives})
    require_nothing_lost(make_cluster(**settings), expected, [1])


def test_a_replacement_that_lacks_rows_trains_with_all_ids(make_cluster, right_states):
    """Slots whose rows are not decoded yet are given to new ids."""
    settings = settings_of("mirror", job=JOB, num_steps=STEPS)
    settings["options"]["rebuild_rate"] = 1
    cluster = make_cluster(suicides={"1": {"1": ["reduced", 7]}}, **settings)
    run(cluster)
    found, expected = states(cluster), right_states("mirror")
    assert found == {at: known for at, known in expected.items() if at in found}
    assert all((rank, STEPS) in found for rank in cluster.ranks)
    assert [event for event in cluster.events(1, "step") if "tables" not in event]
    last = last_recovery(cluster)
    assert (last["recovery"], last["obstacle"], last["lost"]) == ("exact", "", [1])


def test_a_partial_recovery_takes_the_ids_with_the_rows_from_parity(make_cluster):
    settings = settings_of("mirror", job=JOB, recovery="partial", num_steps=STEPS)
    cluster = make_cluster(suicides={"1": {"1": ["before the delta", 8]}}, **settings)
    run(cluster)
    recovery = last_recovery(cluster)
    assert (recovery["recovery"], recovery["bytes_read"]) == ("partial", [0, 0])
    lost = {e["step"]: e["replicas"]["map"] for e in cluster.events(1, "step")}
    assert cluster.recoveries(1)[-1]["replicas"]["map"] == lost[7]


def test_two_of_a_group_lost_together_take_ids_and_rows_from_the_store(make_cluster):
    suicides = {"1": {"1": ["reduced", 9]}, "2": {"1": ["reduced", 9], "2": ["reduced", 11]}}
    settings = settings_of("three", job=JOB, num_steps=14)
    cluster = make_cluster(suicides=suicides, **settings)
    run(cluster)
    fallback, exact = (e["recovery"] for e in cluster.recoveries(0)[-2:])
    assert (fallback["recovery"], fallback["lost"]) == ("partial", [1, 2])
    assert min(fallback["bytes_read"][1:]) > 0
    assert (exact["recovery"], exact["lost"], exact["samples_lost"]) == ("exact", [2], [0, 0, 0])


@pytest.mark.parametrize(
    ("steps", "kills"),
    [(30, 2), pytest.param(80, 8, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
def test_kills_at_random_moments_cost_nothing(make_cluster, right_states, steps, kills):
    """Of one worker or another, each once the last replacement trains."""
    chance = random.Random()
    cluster = make_cluster(**settings_of("three", job=JOB, num_steps=steps))
    cluster.start()
    killed = []
    for moment in sorted(chance.sample(range(1, steps - 5), kills)):
        cluster.wait_until(lambda moment=moment: newest_step(cluster) >= moment, WAIT_SECONDS)
        victim = chance.choice(cluster.ranks)
        time.sleep(0.1 * chance.random())
        if cluster.exit_code(victim, 0) is None:
            cluster.kill(victim)
            if cluster.exit_code(victim, WAIT_SECONDS) == -signal.SIGKILL:
                killed.append(victim)
                cluster.start(victim)
                cluster.wait_until(lambda rank=victim: is_rebuilt(cluster, rank), WAIT_SECONDS)
    cluster.finish(WAIT_SECONDS)
    require_states(cluster, right_states("three", num_steps=steps), killed)
    found = {event["recovery"]["recovery"] for event in cluster.recoveries(0)[1:]}
    assert found <= {"exact"}
