"""Workers that leave as planned: their successors have all that they had."""

import signal

from cpr_ext.runtime.termination import EXIT_CODE


def leave(cluster, *ranks):
    """Ask them to leave by SIGTERM, see them end, start successors, and wait for these."""
    before = len(cluster.recovered(0))
    cluster.kill(*ranks, with_signal=signal.SIGTERM)
    for rank in ranks:
        assert cluster.exit_code(rank) == EXIT_CODE, cluster.logs()
    cluster.start(*ranks)
    cluster.wait_for_recovery(before + 1)
    return cluster.recoveries(ranks[0])[-1]


def test_the_successors_of_workers_that_left_have_lost_nothing(make_cluster):
    """One leaves, then all; then one that waits for another.

    Snapshots of chosen rows, and rare: what a successor has is what was saved to leave.
    """
    cluster = make_cluster(world_size=2, step_seconds=0.01, every_steps=1000, num_steps=10_000)
    cluster.start()
    cluster.wait_for_step(20)
    told = leave(cluster, 1)
    assert (told["lost"], told["samples_lost"]) == ([1], [0, 0])
    assert told["rows_restored"][1] > 0
    cluster.wait_for_step(told["step"] + 5)
    told = leave(cluster, 0, 1)
    assert told["lost"] == [0, 1]
    assert told["step"] >= 25
    assert max(told["samples_lost"]) <= cluster.settings.batch_size
    cluster.wait_for_step(told["step"] + 2)
    cluster.kill(1)
    cluster.wait_for_loss(0)
    cluster.kill(0, with_signal=signal.SIGTERM)
    assert cluster.exit_code(0) == EXIT_CODE, cluster.logs()
