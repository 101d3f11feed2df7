"""Workers are killed: the others keep their memory and go on, replacements load their shards."""

from pathlib import Path

from cpr_ext.distributed import worker_directory

# Every row of a snapshot is of one step, so that a replacement's tables can be compared.
EXACT = {"step_seconds": 0.01, "priority": "AllRows", "every_steps": 4}


def survive(cluster, *victims, ruin=False):
    """Kill ``victims`` in the middle of training, start them again, and see that all is as it was.

    Args:
        ruin: overwrite the segments of all survivors' stores meanwhile: nobody may read them.
    """
    survivors = [rank for rank in cluster.ranks if rank not in victims]
    begun = max(cluster.step(rank) for rank in cluster.ranks) + 10
    cluster.wait_for_step(begun)
    before = {rank: len(cluster.recoveries(rank)) for rank in cluster.ranks}
    pids = dict(cluster.pids)
    cluster.kill(*victims)
    cluster.wait_for_death(*victims)
    if ruin:
        for rank in survivors:
            cluster.wait_until(lambda rank=rank: cluster.events(rank)[-1]["event"] == "peer_lost")
            ruin_segments(store_of(cluster, rank))
    cluster.start(*victims)
    for rank in cluster.ranks:
        cluster.wait_until(lambda rank=rank: len(cluster.recoveries(rank)) > before[rank])
    for rank in survivors:
        lost, joined, recovered = cluster.events(rank)[-3:] if ruin else last_three(cluster, rank)
        assert recovered["pid"] == pids[rank]
        assert lost["tables"] == joined["tables"] == recovered["tables"]
    for rank in victims:
        check_replacement(cluster, rank, pids[rank], victims)


def last_three(cluster, rank):
    """The events of the last loss that this worker outlived."""
    events = [e for e in cluster.events(rank) if e["event"] != "step"]
    number = max(i for i, e in enumerate(events) if e["event"] == "recovered")
    return events[number - 2 : number + 1]


def check_replacement(cluster, rank, old_pid, victims):
    """Its tables are those its predecessor had when they were last saved; the account says when."""
    event, batch_size = cluster.recoveries(rank)[-1], cluster.settings.batch_size
    recovery = event["recovery"]
    assert recovery["lost"] == sorted(victims)
    assert recovery["source"] not in victims
    for other in cluster.ranks:
        is_victim = other in victims
        assert (recovery["bytes_read"][other] > 0) == is_victim
        assert is_victim or recovery["samples_lost"][other] <= batch_size
    saved_step = recovery["step"] - recovery["samples_lost"][rank] // batch_size
    steps = [e for e in cluster.events(rank) if e["event"] in ("step", "recovered")]
    saved = [e for e in steps if e["step"] == saved_step and e["pid"] != event["pid"]]
    assert saved, f"worker {rank} says its rows are of step {saved_step}"
    assert event["tables"] in [e["tables"] for e in saved]


def store_of(cluster, rank):
    stores = Path(cluster.settings.directory) / "stores"
    return worker_directory(stores, rank, cluster.settings.world_size)


def ruin_segments(store):
    files = [path for path in store.glob("segments/*") if "dense" not in path.name]
    assert files
    for file in files:
        file.write_bytes(b"\0" * file.stat().st_size)


def test_survivors_go_on_in_their_processes_whoever_is_killed(make_cluster):
    """One of four; two at once, the lowest rank among them; the same worker again and again."""
    cluster = make_cluster(num_steps=10_000, **EXACT)
    cluster.start()
    survive(cluster, 2)
    survive(cluster, 0, 3)
    for _ in range(3):
        survive(cluster, 1)


def test_a_replacement_reads_its_own_store_and_nobody_reads_another(make_cluster):
    cluster = make_cluster(num_steps=10_000, **EXACT)
    cluster.start()
    survive(cluster, 2, ruin=True)


def test_a_worker_killed_while_it_saves_and_one_while_it_recovers_come_back(make_cluster):
    cluster = make_cluster(
        num_steps=60,
        step_seconds=0.01,
        suicides={"1": {"1": ["saving", 15]}, "2": {"2": ["recovering", 0]}},
    )
    cluster.start()
    cluster.wait_for_death(1)
    cluster.start(1)
    cluster.wait_for_step(25)
    cluster.kill(2)
    cluster.wait_for_death(2)
    cluster.start(2)
    cluster.wait_for_death(2)
    cluster.start(2)
    cluster.finish()
    # Every step was trained behind the one before it, by all; none was left out.
    for rank in cluster.ranks:
        check_steps_follow(cluster, rank)
    assert [r["recovery"]["lost"] for r in cluster.recoveries(0)] == [[0, 1, 2, 3], [1], [2]]


def test_a_replacement_that_dies_as_soon_as_all_have_met_is_not_waited_for(make_cluster):
    """The others have just begun to connect to it, and need not wait until that takes too long."""
    suicides = {"1": {"2": ["joining", 0]}}
    cluster = make_cluster(num_steps=60, step_seconds=0.01, suicides=suicides)
    cluster.start()
    cluster.wait_for_step(20)
    for _ in range(2):
        if cluster.life(1) == 1:
            cluster.kill(1)
        cluster.wait_for_death(1)
        cluster.start(1)
    cluster.finish()
    assert "does not answer" not in cluster.logs()


def check_steps_follow(cluster, rank):
    position = 0
    for event in cluster.events(rank):
        if event["event"] == "recovered":
            position = event["step"]
        if event["event"] == "step":
            assert event["step"] == position + 1
            position += 1


def test_all_four_are_killed_and_the_job_goes_on_from_the_stores(make_cluster):
    cluster = make_cluster(num_steps=40, step_seconds=0.01)
    cluster.start()
    cluster.wait_for_step(20)
    cluster.kill(*cluster.ranks)
    cluster.wait_for_death(*cluster.ranks)
    cluster.start()
    cluster.finish()
    [recovery] = [e["recovery"] for e in cluster.recoveries(0) if e["pid"] == cluster.pids[0]]
    assert recovery["lost"] == [0, 1, 2, 3]
    assert min(recovery["bytes_read"]) > 0
    # From the newest step that any of them saved.
    assert 10 <= recovery["step"] <= 21
    assert cluster.recoveries(0)[0]["recovery"]["bytes_read"] == [0, 0, 0, 0]


def test_full_recovery_ends_in_the_very_state_of_a_job_without_failures(make_cluster):
    exact = {
        "num_steps": 40, "recovery": "full", "priority": "AllRows", "world_size": 2,
    }  # fmt: skip
    ends = []
    for name, victim in (("untouched", None), ("killed", 1)):
        cluster = make_cluster(name, step_seconds=0.01 if victim else 0.0, **exact)
        cluster.start()
        if victim is not None:
            cluster.wait_for_step(18)
            cluster.kill(victim)
            cluster.wait_for_death(victim)
            cluster.start(victim)
        cluster.finish()
        ends.append([cluster.events(rank, "finished")[0]["tables"] for rank in cluster.ranks])
    assert ends[0] == ends[1]
    last = cluster.recoveries(0)[-1]["recovery"]
    assert (last["recovery"], last["samples_lost"]) == ("full", [0, 0])
    # A survivor went back, too, and to a step that was saved.
    assert last["step"] % 5 in (0, 1)
    assert cluster.events(0, "peer_lost")[0]["step"] > last["step"]


def test_workers_of_which_one_is_two_commits_ahead_have_a_point_in_common(make_cluster):
    cluster = make_cluster(
        num_steps=40, world_size=2, recovery="full", priority="AllRows",
        suicides={"1": {"1": ["lagging", 18]}},
    )  # fmt: skip
    cluster.start()
    cluster.wait_for_death(1)
    cluster.start(1)
    cluster.finish()
    last = cluster.recoveries(0)[-1]["recovery"]
    assert (last["recovery"], last["lost"], last["samples_lost"]) == ("full", [1], [0, 0])
    assert 0 < last["step"] < 18


def test_a_worker_lost_while_all_roll_back_changes_nothing_of_where_they_end(make_cluster):
    exact = {
        "num_steps": 40, "recovery": "full", "priority": "AllRows",
        "world_size": 3, "batch_size": 33, "step_seconds": 0.01,
    }  # fmt: skip
    untouched = make_cluster("untouched", **exact)
    untouched.start()
    struck = make_cluster("struck", suicides={"0": {"1": ["rolling back", 0]}}, **exact)
    struck.start()
    struck.wait_for_step(18)
    struck.kill(1)
    struck.wait_for_death(1)
    struck.start(1)
    struck.wait_for_death(0)  # it had outlived worker 1
    struck.start(0)
    for cluster in (struck, untouched):
        cluster.finish()
    ends = [
        [cluster.events(rank, "finished")[0]["tables"] for rank in cluster.ranks]
        for cluster in (struck, untouched)
    ]
    assert ends[0] == ends[1]
    # Worker 2 outlived both. Not half rolled back: it says so, and nobody takes its position.
    last = struck.recoveries(2)[-1]["recovery"]
    assert (last["recovery"], last["samples_lost"]) == ("full", [0, 0, 0])
    assert last["step"] > 0


def test_without_a_point_that_all_have_full_recovery_begins_anew(make_cluster):
    cluster = make_cluster(
        num_steps=20, world_size=2, recovery="full", suicides={"1": {"1": ["training", 0]}}
    )
    cluster.start()
    cluster.wait_for_death(1)
    cluster.start(1)
    cluster.finish()
    survivor = cluster.events(0)
    assert "peer_lost" in [event["event"] for event in survivor]
    first, last = cluster.recoveries(0)
    assert (last["recovery"]["recovery"], last["step"]) == ("full", 0)
    # From the values that it began with, in the same process.
    assert (last["tables"], last["pid"]) == (first["tables"], first["pid"])


def test_a_worker_started_behind_the_end_finds_that_the_job_is_finished(make_cluster):
    cluster = make_cluster(num_steps=3, world_size=2)
    cluster.start()
    cluster.finish()
    cluster.start(1)
    assert cluster.exit_code(1) == 0
    assert [event["event"] for event in cluster.events(1)[-2:]] == ["started", "ended"]


def test_a_death_that_no_connection_shows_is_heard_of_from_the_rendezvous(make_cluster, tmp_path):
    """A child, such as a data loader's, has the connections of the dead; nobody times out here."""
    cluster = make_cluster(
        suicides={"1": {"1": ["leaving a child", 20]}},
        num_steps=40, step_seconds=0.01, time_outs={"collective_seconds": 900.0},
    )  # fmt: skip
    try:
        cluster.start()
        cluster.wait_for_death(1)
        cluster.start(1)
        cluster.finish()
    finally:
        (tmp_path / "over").touch()
    assert [e["recovery"]["lost"] for e in cluster.recoveries(0)[1:]] == [[1]]
