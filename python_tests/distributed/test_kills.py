"""Workers are killed: the others keep their memory and go on, replacements load their shards."""

import pytest

from cpr_ext.distributed import worker_directory
from python_tests.distributed.losses import long, mlp
from python_tests.distributed.mlp_job import DIM, SEVERAL_BUCKETS, VARIANTS

# Every row of a snapshot is of one step, so that a replacement's tables can be compared.
EXACT = {"step_seconds": 0.01, "priority": "AllRows", "every_steps": 4, "num_steps": 10_000}
DEVICE = {"options": {"device": True}, "world_size": 2}


def survive(cluster, *victims, ruin=False):
    """Kill ``victims`` in the middle of training, start them again, and see that all is as it was.

    Args:
        ruin: overwrite the segments of all survivors' stores meanwhile: nobody may read them.
    """
    survivors = [rank for rank in cluster.ranks if rank not in victims]
    cluster.wait_for_step(max(cluster.step(rank) for rank in cluster.ranks) + 10)
    before, pids = len(cluster.recovered(survivors[0])), dict(cluster.pids)
    cluster.kill(*victims)
    cluster.wait_for_loss(*survivors)
    for rank in survivors if ruin else ():
        ruin_segments(worker_directory(cluster.stores, rank, cluster.settings.world_size))
    cluster.start(*victims)
    cluster.wait_for_recovery(before + 1)
    for rank in survivors:
        events = [e for e in cluster.events(rank) if e["event"] != "step"]
        number = max(i for i, e in enumerate(events) if e["event"] == "recovered")
        lost, joined, recovered = events[number - 2 : number + 1]
        assert recovered["pid"] == pids[rank]
        assert lost["tables"] == joined["tables"] == recovered["tables"]
    for rank in victims:
        check_replacement(cluster, rank, victims)


def check_replacement(cluster, rank, victims):
    """Its tables are those its predecessor had when they were last saved; the account says when."""
    event, batch_size = cluster.recovered(rank)[-1], cluster.settings.batch_size
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
    assert event["tables"] in [e["tables"] for e in saved], f"{rank} has step {saved_step}"


def ruin_segments(store):
    files = [path for path in store.glob("segments/*") if "dense" not in path.name]
    assert files
    for file in files:
        file.write_bytes(b"\0" * file.stat().st_size)


def test_survivors_go_on_in_their_processes_whoever_is_killed(make_cluster):
    """Two at once, the lowest rank among them; the same one again and again; nobody reads another's
    store."""
    cluster = make_cluster(**EXACT)
    cluster.start()
    survive(cluster, 0, 3)
    survive(cluster, 1)
    survive(cluster, 1)
    survive(cluster, 2, ruin=True)


def test_workers_with_tables_on_a_device_go_on_whoever_is_killed(make_cluster):
    """Emulated GPUs; their group is on gloo."""
    cluster = make_cluster(**EXACT, **DEVICE)
    cluster.start()
    survive(cluster, 1)
    survive(cluster, 0)
    launched = [e["launched"] for rank in cluster.ranks for e in cluster.events(rank, "kernels")]
    assert min(launched) > 0, "a step counted no rows on the device"


@pytest.mark.parametrize("settings", [{}, DEVICE], ids=["four", "device"])
def test_all_are_killed_and_the_job_goes_on_from_the_stores(make_cluster, settings):
    cluster = make_cluster(num_steps=40, step_seconds=0.01, **settings)
    cluster.start()
    cluster.wait_for_step(20)
    cluster.kill(*cluster.ranks)
    cluster.start()
    cluster.finish()
    first, last = cluster.recoveries()
    assert last["lost"] == [*cluster.ranks]
    assert min(last["bytes_read"]) > 0 == max(first["bytes_read"])
    assert 10 <= last["step"] <= 21  # from the newest step that any of them saved


def test_a_worker_that_cannot_save_for_a_while_leaves_a_point_in_common(make_cluster, tmp_path):
    cluster = make_cluster(
        num_steps=120, world_size=2, recovery="full", priority="AllRows", step_seconds=0.02,
        deaths={1: [["full disk", 15]]},
    )  # fmt: skip
    cluster.start()
    cluster.wait_for_step(42)  # four commits failed, at least
    cluster.kill(0)
    (tmp_path / "job" / "room").touch()
    cluster.start(0)
    cluster.finish()
    for rank in cluster.ranks:
        last = cluster.recoveries(rank)[-1]
        assert (last["recovery"], last["step"]) == ("full", 11)
    log = (tmp_path / "job" / "log-0-1").read_text()
    assert log.count("workers [1] have made none of the newest 3 full-recovery points known") == 1


def test_a_death_that_no_connection_shows_is_heard_of_from_the_rendezvous(make_cluster, tmp_path):
    """A child, such as a data loader's, has the connections of the dead; nobody times out here."""
    cluster = make_cluster(
        deaths={1: [["leaving a child", 20]]},
        num_steps=40, step_seconds=0.01, time_outs={"collective_seconds": 900.0},
    )  # fmt: skip
    try:
        cluster.run()
    finally:
        (tmp_path / "job" / "over").touch()
    assert cluster.lost()[1:] == [[1]]


MOMENTS = (
    *("forward", "backward", "reduced", "optimizer", "saving", "joining", "committing"),
    "recovering",
)
IN_NO_STEP = ("joining", "recovering")


@pytest.mark.parametrize(
    ("victim", "moments", "world_size", "options"),
    [
        (0, MOMENTS, 3, {"layers": SEVERAL_BUCKETS}),
        (1, ("backward", "reduced"), 2, {"variants": sorted(VARIANTS), "layers": (DIM, 16, 1)}),
        (1, ("backward", "reduced"), 2, {"shared": True}),
        long(2, ("backward", "optimizer"), 4, {"layers": SEVERAL_BUCKETS}),
    ],
)
def test_replicas_are_equal_in_every_bit_after_deaths(
    make_cluster, victim, moments, world_size, options
):
    """A life after the other; in several buckets, in each variant, with a replicated table."""
    deaths = {victim: [[at, 0 if at in IN_NO_STEP else 4 * n] for n, at in enumerate(moments, 1)]}
    settings = {**mlp(), "world_size": world_size, "recovery": "partial", "options": options}
    steps = {"num_steps": 4 * len(moments) + 8, "every_steps": 3}
    cluster = make_cluster(deaths=deaths, **{**settings, **steps})
    cluster.run()
    survivor = (victim + 1) % world_size
    assert {e["pid"] for e in cluster.events(survivor)} == {cluster.pids[survivor]}
    # A recovery that ended with a death is nobody's; nobody connects to the dead in vain.
    ended = len([*filter(IN_NO_STEP.__contains__, moments)])
    assert len(cluster.recoveries(survivor)) == 1 + len(moments) - ended
    assert "does not answer" not in cluster.logs()
    require_equal_replicas(cluster)
    if "shared" in options:
        assert cluster.recovered(0)[-1]["replicas"].keys() == {"plain", "shared"}
        assert "replicated, so saved as dense: shared.module" in cluster.logs()


def require_equal_replicas(cluster):
    """At every step and recovery, of all workers that came so far."""
    for kind in ("step", "recovered"):
        seen = {}
        for rank in cluster.ranks:
            for event in cluster.events(rank, kind):
                for name, replica in event["replicas"].items():
                    # A step that was trained twice has been trained from the same values.
                    known = seen.setdefault((event["step"], name), replica)
                    assert known == replica, f"{kind} {event['step']}, worker {rank}: {name}"
        assert seen


@pytest.mark.parametrize(
    ("spoiled", "named"),
    [
        (["bit", 1, 3], "parameter 'plain.module.layers.0.weight'"),
        (["plan", 1], "workers 0 and 1 both hold 'rows[38:40, 0:8]'"),
        (["layout", 1], "'plain': static_graph (workers [0]: false; workers [1]: true)"),
    ],
)
def test_a_difference_is_found_before_the_next_step(make_cluster, spoiled, named):
    options = {"check_every_steps": 1, "spoil": spoiled}
    settings = {**mlp(), "recovery": "partial", "options": options}
    cluster = make_cluster(**settings)
    cluster.start()
    assert set(cluster.exit_codes().values()) == {1}, cluster.logs()
    assert cluster.logs().count("WorkersDifferError: workers do not hold the same job") == 2
    assert named in cluster.logs()
    steps = [len(cluster.events(rank, "step")) for rank in cluster.ranks]
    assert steps == [4, 4] if spoiled[0] == "bit" else [0, 0]
