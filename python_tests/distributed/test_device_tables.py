"""Workers with tables on GPUs (emulated), their group on gloo: they outlive kills as on the CPU."""

from python_tests.distributed.test_kills import EXACT, survive

JOB = {"job": ("python_tests.distributed.device_job", "DeviceJob"), "world_size": 2}


def test_workers_with_tables_on_a_device_go_on_whoever_is_killed(make_cluster):
    """Survivors keep their rows; a replacement has what its predecessor saved, bit for bit."""
    cluster = make_cluster(num_steps=10_000, **EXACT, **JOB)
    cluster.start()
    survive(cluster, 1)
    survive(cluster, 0)
    for rank in cluster.ranks:
        launched = [event["launched"] for event in cluster.events(rank, "kernels")]
        assert min(launched) > 0, "a step counted no rows on the device"


def test_all_are_killed_and_the_job_goes_on_from_the_stores(make_cluster):
    cluster = make_cluster(num_steps=24, step_seconds=0.01, **JOB)
    cluster.start()
    cluster.wait_for_step(12)
    cluster.kill(*cluster.ranks)
    cluster.wait_for_death(*cluster.ranks)
    cluster.start()
    cluster.finish()
    [recovery] = [e["recovery"] for e in cluster.recoveries(0) if e["pid"] == cluster.pids[0]]
    assert recovery["lost"] == [0, 1]
    assert recovery["step"] >= 5
