"""A worker is killed: the others keep their memory and go on, its replacement loads its shards."""


def test_one_of_four_is_killed_and_the_others_go_on_in_the_same_process(make_cluster):
    cluster = make_cluster(num_steps=60, step_seconds=0.02)
    cluster.start()
    cluster.wait_for_step(20)
    pids = dict(cluster.pids)
    cluster.kill(2)
    cluster.wait_for_death(2)
    cluster.start(2)
    cluster.finish()
    for rank in (0, 1, 3):
        assert cluster.pids[rank] == pids[rank]
        lost = cluster.events(rank, "peer_lost")[-1]
        recovered = cluster.recoveries(rank)[-1]
        assert recovered["tables"] == lost["tables"]
