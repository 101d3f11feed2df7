"""Workers that are silent, places that are taken, a rendezvous that dies, peers that never come."""

import re
import signal
import time

from python_tests.distributed.losses import mlp

TWO = {"world_size": 2, "step_seconds": 0.02}


def test_a_stopped_worker_is_waited_for_and_nobody_meets_again(make_cluster):
    """For longer than ``collective_seconds``, too; stopped or not, nobody takes its place."""
    time_outs = {"collective_seconds": 1.0, "identity_seconds": 0.5}
    cluster = make_cluster(num_steps=60, **TWO, time_outs=time_outs)
    cluster.start()
    cluster.wait_for_step(10)
    cluster.kill(1, with_signal=signal.SIGSTOP)
    stopped, said = (
        cluster.pids[1],
        r"worker 0 has waited \d+ s after step \d+ for workers 1, whose",
    )
    cluster.wait_until(lambda: re.search(said, cluster.logs()))
    cluster.start(1)
    assert cluster.exit_code(1) == 1
    assert f"worker 1 is still process {stopped} after 0.5 s" in cluster.logs()
    cluster.pids[1] = stopped
    cluster.kill(1, with_signal=signal.SIGCONT)
    cluster.finish()
    assert all(cluster.events(rank, "peer_lost") == [] for rank in cluster.ranks)


def test_a_worker_that_hangs_for_good_is_named_and_ends_the_job(make_cluster):
    time_outs = {"collective_seconds": 1.0, "join_seconds": 4.0}
    cluster = make_cluster(num_steps=60, **TWO, time_outs=time_outs)
    cluster.start()
    cluster.wait_for_step(10)
    cluster.kill(1, with_signal=signal.SIGSTOP)
    assert cluster.exit_code(0) == 1
    assert re.search(r"waited 4 s at [\d.:]+ for workers 1, which did not come", cluster.logs())


def test_full_recovery_does_not_abandon_points_for_an_empty_store(make_cluster):
    settings = mlp(recovery="full", num_steps=24)
    cluster = make_cluster(**{**settings, "step_seconds": 0.01})
    cluster.start()
    cluster.wait_for_step(14)
    cluster.kill(1)
    cluster.start(1, stores="another disk")
    assert cluster.exit_codes(40) == {0: 1, 1: 1}
    assert "StoreError: no full-recovery point is in the stores of all workers" in cluster.logs()
    over = {"options": {**settings["options"], "start_over": True}}
    cluster.start(0, **over)
    cluster.start(1, stores="another disk", **over)
    cluster.finish()
    assert cluster.recoveries(1)[-1]["step"] == 0


def test_training_outlives_the_rendezvous_and_needs_it_again_when_a_worker_is_lost(make_cluster):
    """One that hangs is asked again until it answers."""
    cluster = make_cluster(num_steps=120, **TWO)
    cluster.start()
    cluster.wait_for_step(10)
    cluster.kill_host()
    cluster.wait_for_step(30)
    assert all(cluster.events(rank, "peer_lost") == [] for rank in cluster.ranks)
    cluster.kill(0)
    cluster.start_host()
    cluster.start(0)
    cluster.wait_for_recovery(2)
    cluster.kill_host(signal.SIGSTOP)
    cluster.kill(1)
    cluster.start(1)
    cluster.wait_until(lambda: "does not answer" in cluster.logs())
    cluster.kill_host(signal.SIGCONT)
    cluster.finish()
    assert cluster.lost() == [[0, 1], [0], [1]]


def test_a_rendezvous_that_hangs_for_good_ends_the_job(make_cluster):
    cluster = make_cluster(num_steps=1000, **TWO, time_outs={"join_seconds": 4.0})
    cluster.start()
    cluster.wait_for_step(10)
    cluster.kill_host(signal.SIGSTOP)
    cluster.kill(1)
    assert cluster.exit_code(0) == 1
    assert re.search(r"waited 4 s at [\d.:]+, which does not answer \(", cluster.logs())


def test_loading_may_take_longer_than_a_collective(make_cluster):
    time_outs = {"collective_seconds": 2.0}
    cluster = make_cluster(num_steps=30, **TWO, load_seconds=3.0, time_outs=time_outs)
    cluster.start()
    cluster.wait_for_step(10)
    cluster.kill(1)
    cluster.start(1)
    cluster.finish()
    assert cluster.lost() == [[0, 1], [1]]


def test_two_workers_of_one_rank_are_told_apart_without_a_common_file_system(make_cluster):
    cluster = make_cluster(num_steps=10, world_size=2, time_outs={"collective_seconds": 2.0})
    pids = []
    for stores in ("here", "there"):
        cluster.start(1, stores=stores)
        pids.append(cluster.pids[1])
    cluster.wait_until(lambda: [cluster.wait_for_exit(pid, 0) for pid in pids].count(1) == 1)
    assert "RendezvousError: two processes are worker 1" in cluster.logs()
    [cluster.pids[1]] = [pid for pid in pids if cluster.wait_for_exit(pid, 0) is None]
    cluster.start(0)
    cluster.finish()


def test_a_second_process_does_not_take_the_rank_of_a_worker_that_trains(make_cluster):
    """It has another disk, so no lock keeps it out; it waits for the next round before all others.

    Worker 1 needs a moment to notice the loss of worker 0, whose replacement is there at once.
    """
    cluster = make_cluster(num_steps=150, **TWO, time_outs={"identity_seconds": 3.0})
    cluster.start()
    cluster.wait_for_step(5)
    second = cluster.start_another(1, stores="another disk")
    cluster.wait_until(lambda: len(cluster.events(1, "began")) == 2)
    time.sleep(0.5)  # until it is at the rendezvous
    cluster.kill(1, with_signal=signal.SIGSTOP)
    cluster.kill(0)
    cluster.start(0)
    time.sleep(1.0)  # all ranks are there, if anybody may be worker 1
    cluster.kill(1, with_signal=signal.SIGCONT)
    cluster.finish()
    assert cluster.wait_for_exit(second, 60) == 1
    assert "which is connected to the rendezvous after 3 s" in cluster.logs()
    assert {e["pid"] for e in cluster.recovered(1)} == {cluster.pids[1]}
    assert cluster.lost(1) == [[0, 1], [0]]
