"""Runs of a job one after the other: at one rendezvous, of another size, from another's stores."""

from itertools import chain

import pytest

from python_tests.distributed.losses import long, mlp


def split(recovery, world_size, num_steps, **options):
    """Rows of one table, cut into as many parts as there are workers."""
    settings = {**mlp(recovery=recovery, num_steps=num_steps), "world_size": world_size}
    return {**settings, "options": {"total": 120, **options}}


def joined(events):
    """All rows in their order, and the dense part."""
    parts = [event["replicas"] for event in events]
    return list(chain.from_iterable(part["rows"] for part in parts)), parts[0]["plain"]


def begin(cluster):
    return joined([cluster.recovered(rank)[0] for rank in cluster.ranks])


def end(cluster):
    return joined([cluster.events(rank, "step")[-1] for rank in cluster.ranks])


def test_runs_at_one_rendezvous_train_and_their_stores_are_not_mixed(make_cluster):
    cluster = make_cluster(num_steps=3, world_size=2)
    for stores in ("first", "second"):
        cluster.start(stores=stores)
        assert cluster.exit_codes(60) == {0: 0, 1: 0}, cluster.logs()
    for rank in cluster.ranks:
        assert [event["step"] for event in cluster.events(rank, "step")] == [1, 2, 3] * 2
    cluster.start(stores="second")  # this one is finished
    assert cluster.exit_codes(60) == {0: 0, 1: 0}
    assert [event["event"] for event in cluster.events(0)[-2:]] == ["began", "ended"]
    cluster.start(0, stores="first", num_steps=6)
    cluster.start(1, stores="second", num_steps=6)
    assert cluster.exit_codes(60) == {0: 1, 1: 1}
    assert "WorkersDifferError: the stores of the workers are of different runs" in cluster.logs()


@pytest.mark.parametrize(
    ("before", "after", "recovery"),
    [(2, 3, "full"), (4, 1, "full"), (2, 3, "partial"), long(3, 2, "full")],
)
def test_a_job_of_another_size_goes_on_from_the_stores_of_another(
    make_cluster, before, after, recovery
):
    """One dies before the first snapshot here, so all begin from the other job's stores again."""
    first = make_cluster("first", **split(recovery, before, 6))
    first.run()
    settings = split(recovery, after, 15, from_store=str(first.stores))
    refused = make_cluster("refused", **split(recovery, after, 15))
    refused.start(stores=str(first.stores))
    assert set(refused.exit_codes(60).values()) == {1}
    said = f"holds the stores of a job of {before} workers, and this job has {after}"
    assert said in refused.logs()
    # The snapshot of step 11 waits for that of step 7: from then on all have one in common.
    moments = (7, 12, 13, 14) if recovery == "full" else (6,)
    victim, deaths = after - 1, [["forward", step] for step in moments]
    cluster = make_cluster("killed", deaths={victim: deaths}, **settings)
    cluster.run()
    assert begin(cluster) == end(first)
    resumed = [event["step"] for event in cluster.recovered(victim)]
    assert resumed == sorted(resumed)
    if recovery == "partial":
        last = cluster.recovered(0)[-1]
        assert (last["recovery"]["recovery"], last["recovery"]["lost"]) == ("partial", [victim])
        assert (last["step"], set(last["recovery"]["samples_lost"])) == (6, {0})
        own = [cluster.recovered(rank)[-1]["replicas"]["rows"] for rank in cluster.ranks]
        assert list(chain.from_iterable(own)) == end(first)[0]
        return
    assert resumed[0] == 6 < resumed[-1]
    untouched = make_cluster("untouched", **settings)
    untouched.run()
    assert [event["step"] for event in untouched.events(0, "step")] == list(range(7, 16))
    assert end(cluster) == end(untouched)
