"""Workers that leave as planned: their successors have all that they had."""

import signal

from cpr_ext.runtime.termination import EXIT_CODE

# Snapshots of chosen rows, and rare: what a successor has is what was saved to leave.
RARE = {"step_seconds": 0.01, "every_steps": 1000, "num_steps": 10_000}


def leave(cluster, *ranks):
    """Ask them to leave by SIGTERM, see them end, start successors, and wait for these."""
    before = {rank: len(cluster.recoveries(rank)) for rank in cluster.ranks}
    cluster.kill(*ranks, with_signal=signal.SIGTERM)
    for rank in ranks:
        assert cluster.exit_code(rank) == EXIT_CODE, cluster.logs()
    cluster.start(*ranks)
    for rank in cluster.ranks:
        cluster.wait_until(lambda rank=rank: len(cluster.recoveries(rank)) > before[rank])
    return cluster.recoveries(ranks[0])[-1]["recovery"]


def test_the_successor_of_a_worker_that_left_has_lost_nothing(make_cluster):
    cluster = make_cluster(world_size=2, **RARE)
    cluster.start()
    cluster.wait_for_step(20)
    recovery = leave(cluster, 1)
    assert recovery["lost"] == [1]
    assert recovery["rows_restored"][1] > 0
    assert recovery["samples_lost"] == [0, 0]


def test_a_job_whose_workers_are_all_asked_to_leave_resumes_where_it_was(make_cluster):
    cluster = make_cluster(world_size=2, **RARE)
    cluster.start()
    cluster.wait_for_step(20)
    recovery = leave(cluster, 0, 1)
    steps = [max(e["step"] for e in cluster.events(r, "step")) for r in cluster.ranks]
    assert recovery["lost"] == [0, 1]
    assert recovery["step"] >= 20
    assert max(recovery["samples_lost"]) <= cluster.settings.batch_size, steps


def test_a_worker_that_waits_for_others_leaves_as_well(make_cluster):
    cluster = make_cluster(world_size=2, **RARE)
    cluster.start()
    cluster.wait_for_step(20)
    cluster.kill(1)
    cluster.wait_until(lambda: cluster.events(0)[-1]["event"] == "peer_lost")
    cluster.kill(0, with_signal=signal.SIGTERM)
    assert cluster.exit_code(0) == EXIT_CODE, cluster.logs()
