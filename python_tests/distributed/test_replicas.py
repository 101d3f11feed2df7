"""After any loss the replicas of data-parallel modules are equal in every bit, and stay so."""

import pytest

from python_tests.distributed.mlp_job import DIM, SEVERAL_BUCKETS, VARIANTS

JOB = ("python_tests.distributed.mlp_job", "MlpJob")
MOMENTS = ("forward", "backward", "reduced", "optimizer", "saving", "committing")


def run(
    make_cluster, victim, moments, *, job=JOB, variants=("plain",), layers=(DIM, 16, 1), **settings
):
    """A job whose worker ``victim`` kills itself at these moments, a life after the other."""
    deaths = {str(life): [where, 4 * life] for life, where in enumerate(moments, start=1)}
    num_steps = 4 * len(moments) + 8
    cluster = make_cluster(
        job=job, num_steps=num_steps, every_steps=3, suicides={str(victim): deaths},
        options={"variants": variants, "layers": layers}, **settings,
    )  # fmt: skip
    cluster.start()
    for _ in moments:
        cluster.wait_for_death(victim)
        cluster.start(victim)
    cluster.finish()
    survivor = (victim + 1) % cluster.settings.world_size
    assert {e["pid"] for e in cluster.events(survivor)} == {cluster.pids[survivor]}
    # One that ended with a death is nobody's.
    told = [moment for moment in moments if moment != "recovering"]
    assert len(cluster.recoveries(survivor)) == 1 + len(told)
    return cluster


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


def test_replicas_of_one_bucket_are_equal_after_deaths(make_cluster):
    cluster = run(make_cluster, 1, ("forward", "reduced", "committing"), world_size=2)
    require_equal_replicas(cluster)


def test_replicas_of_several_buckets_are_equal_after_every_kind_of_death(make_cluster):
    cluster = run(make_cluster, 0, MOMENTS, world_size=3, layers=SEVERAL_BUCKETS)
    require_equal_replicas(cluster)


def test_four_workers_are_equal_after_deaths(make_cluster):
    cluster = run(make_cluster, 2, ("backward", "optimizer"), world_size=4, layers=SEVERAL_BUCKETS)
    require_equal_replicas(cluster)


def test_replicas_are_equal_after_a_death_while_others_recover(make_cluster):
    cluster = run(make_cluster, 1, ("backward", "recovering"), world_size=2, layers=SEVERAL_BUCKETS)
    require_equal_replicas(cluster)


def test_every_variant_of_data_parallelism_is_reset(make_cluster):
    cluster = run(make_cluster, 1, ("backward", "reduced"), world_size=2, variants=sorted(VARIANTS))
    require_equal_replicas(cluster)


def run_spoiled(make_cluster, *spoil):
    cluster = make_cluster(
        job=JOB, num_steps=10, world_size=2,
        options={
            "variants": ["plain"], "layers": (DIM, 16, 1), "check_every_steps": 1, "spoil": spoil,
        },
    )  # fmt: skip
    cluster.start()
    assert set(cluster.exit_codes().values()) == {1}, cluster.logs()
    assert cluster.logs().count("WorkersDifferError: workers do not hold the same job") == 2
    return cluster


@pytest.mark.parametrize(
    ("spoiled", "named"),
    [
        ("bit", "parameter 'plain.module.layers.0.weight'"),
        ("state", "exp_avg of parameter 'plain.module.layers.0.bias'"),
        ("learning rate", "group 0: lr"),
        ("step", "step (workers [0]: 4; workers [1]: 5)"),
    ],
)
def test_a_difference_is_found_before_the_next_step(make_cluster, spoiled, named):
    cluster = run_spoiled(make_cluster, spoiled, 1, 3)
    for rank in cluster.ranks:
        assert cluster.events(rank)[-1]["step"] == 4 + (spoiled == "step" and rank == 1)
    assert named in cluster.logs()


@pytest.mark.parametrize(
    ("spoiled", "named"),
    [
        ("plan", "workers 0 and 1 both hold 'rows[38:40, 0:8]'"),
        ("layout", "'plain': static_graph (workers [0]: false; workers [1]: true)"),
        ("unused", "'plain': find_unused_parameters (workers [0]: false; workers [1]: true)"),
        ("frozen", "'plain': parameters (workers [0]: [["),
    ],
)
def test_another_plan_or_layout_is_found_before_the_first_step(make_cluster, spoiled, named):
    cluster = run_spoiled(make_cluster, spoiled, 1)
    assert not any(cluster.events(rank, "step") for rank in cluster.ranks)
    assert named in cluster.logs()


def test_replicated_tables_are_dense_where_the_worker_makes_the_checkpointer(make_cluster):
    job = (JOB[0], "LeftToTheWorkerJob")
    cluster = run(make_cluster, 1, ("backward", "reduced"), job=job, world_size=2)
    require_equal_replicas(cluster)
    assert set(cluster.recoveries(0)[-1]["replicas"]) == {"plain", "shared"}
    assert cluster.logs().count("replicated, so saved as dense: shared.module") > 0


def test_a_checkpointer_that_counts_a_replicated_table_by_its_rows_is_refused(make_cluster):
    job = (JOB[0], "ReplicatedTableJob")
    options = {"variants": ["plain"], "layers": (DIM, 16, 1)}
    cluster = make_cluster(job=job, num_steps=5, world_size=2, options=options)
    cluster.start()
    assert set(cluster.exit_codes().values()) == {1}, cluster.logs()
    said = "UsageError: table 'shared.module': replicated by DistributedDataParallel"
    assert cluster.logs().count(said) == 2
    assert not cluster.events(0, "joined")
