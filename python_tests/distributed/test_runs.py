"""Runs of a job one after the other: at one rendezvous, of another size, from another's stores."""

from itertools import chain

import pytest
import torch

import cpr_ext
from cpr_ext.state.table import Table
from cpr_ext.state.table_part import TablePart
from python_tests.distributed.mlp_job import DIM, SAMPLES, WHOLE_STEPS, MlpJob, die, plain

TOTAL = 120


class SplitJob(MlpJob):
    """Rows of one table, cut into as many parts as there are workers."""

    def build(self, group):
        torch.manual_seed(3)
        model = torch.nn.Module()
        model.rows = torch.nn.Embedding(TOTAL // group.size(), DIM, sparse=True)
        model.plain = plain(torch.nn.Linear(DIM, 1))
        self.model = model
        return model, [
            torch.optim.Adagrad(model.rows.parameters(), lr=0.1),
            torch.optim.Adam(model.plain.parameters(), lr=0.01),
        ]

    def train_step(self, job, step):
        own = torch.Generator().manual_seed(1000 * step + job.rank)
        indices = torch.randint(TOTAL // job.world_size, (SAMPLES,), generator=own)
        for optimizer in job.optimizers:
            optimizer.zero_grad()
        if self.suicide == ["forward", step]:
            die()
        job.model.plain(job.model.rows(indices)).square().mean().backward()
        for optimizer in job.optimizers:
            optimizer.step()
        return SAMPLES * job.world_size

    def make_checkpointer(self, model, optimizers, directory):
        size = TOTAL // self.settings.world_size
        begin = size * self.rank
        part = TablePart("rows", (begin, begin + size), (0, DIM), TOTAL, DIM)
        table = Table(part.name, model.rows.weight, optimizers[0], [model.rows], part=part)
        self.job_tables = [table]
        when_busy = "wait" if self.settings.whole_steps else "delay"
        return cpr_ext.Checkpointer(
            model, optimizers, directory, tables=[table],
            schedule=cpr_ext.EverySteps(self.settings.every_steps, when_busy=when_busy),
            **(WHOLE_STEPS if self.settings.whole_steps else {}),
        )  # fmt: skip

    def describe(self):
        rows = self.model.rows.weight.detach().tolist()
        return {"rows": rows, "dense": self.model.plain.module.weight.tolist()}


SPLIT = {"job": ("python_tests.distributed.test_runs", "SplitJob"), "digests": False}


def joined(parts):
    """All rows in their order, and the dense part."""
    return list(chain.from_iterable(part["rows"] for part in parts)), parts[0]["dense"]


def end(cluster):
    return joined([cluster.events(rank, "step")[-1]["replicas"] for rank in cluster.ranks])


def test_a_second_run_at_the_same_rendezvous_trains(make_cluster):
    cluster = make_cluster(num_steps=3, world_size=2)
    for stores in ("first", "second"):
        cluster.start(stores=stores)
        assert cluster.exit_codes(60) == {0: 0, 1: 0}, cluster.logs()
    for rank in cluster.ranks:
        assert [event["step"] for event in cluster.events(rank, "step")] == [1, 2, 3] * 2
    cluster.start(stores="second")  # this one is finished
    assert cluster.exit_codes(60) == {0: 0, 1: 0}
    assert [event["event"] for event in cluster.events(0)[-2:]] == ["started", "ended"]


def test_stores_of_different_runs_are_refused(make_cluster):
    cluster = make_cluster(num_steps=3, world_size=2)
    for stores in ("first", "second"):
        cluster.start(stores=stores)
        assert cluster.exit_codes(60) == {0: 0, 1: 0}
    cluster.start(0, stores="first", num_steps=6)
    cluster.start(1, stores="second", num_steps=6)
    assert cluster.exit_codes(60) == {0: 1, 1: 1}
    assert "WorkersDifferError: the stores of the workers are of different runs" in cluster.logs()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1)])
def test_a_job_of_another_size_begins_where_the_stores_of_another_end(make_cluster, before, after):
    first = make_cluster("first", world_size=before, num_steps=6, **SPLIT)
    first.start()
    first.finish()
    stores = str(first._host_log.parent / "stores")

    options = {"from_store": stores}
    refused = make_cluster("refused", world_size=after, num_steps=9, **SPLIT)
    refused.start(stores=stores)
    assert set(refused.exit_codes(60).values()) == {1}
    assert f"holds the stores of a job of {before} workers, and this job has {after}" in (
        refused.logs()
    )
    cluster = make_cluster("second", world_size=after, num_steps=9, options=options, **SPLIT)
    cluster.start()
    cluster.finish()
    assert [event["step"] for event in cluster.events(0, "step")] == [7, 8, 9]
    begun = [cluster.events(rank, "recovered")[0]["replicas"] for rank in cluster.ranks]
    assert joined(begun) == end(first)


@pytest.mark.parametrize("recovery", ["partial", "full"])
def test_a_worker_lost_before_its_first_snapshot_takes_the_other_jobs_stores(
    make_cluster, recovery
):
    whole = {**SPLIT, "whole_steps": True, "recovery": recovery}
    first = make_cluster("first", world_size=2, num_steps=6, **whole)
    first.start()
    first.finish()
    options = {"from_store": str(first._host_log.parent / "stores")}
    settings = {"num_steps": 9, "every_steps": 30, "options": options, **whole}
    cluster = make_cluster(
        "second", world_size=3, suicides={"1": {"1": ["forward", 6]}}, **settings
    )
    cluster.start()
    cluster.wait_for_death(1)
    cluster.start(1)
    cluster.finish()
    last = cluster.recoveries(0)[-1]
    lost = [1] if recovery == "partial" else [0, 1, 2]  # all build their models again
    assert (last["recovery"]["recovery"], last["recovery"]["lost"]) == (recovery, lost)
    assert (last["step"], last["recovery"]["samples_lost"]) == (6, [0, 0, 0])
    begun = [cluster.recoveries(rank)[-1]["replicas"]["rows"] for rank in cluster.ranks]
    assert list(chain.from_iterable(begun)) == end(first)[0]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 1)])
def test_kills_change_no_bit_of_a_job_that_began_from_the_stores_of_another(
    make_cluster, before, after
):
    """One dies before the first snapshot here, so all begin from the other job's stores again."""
    whole = {**SPLIT, "whole_steps": True, "recovery": "full"}
    first = make_cluster("first", world_size=before, num_steps=6, **whole)
    first.start()
    first.finish()
    options = {"from_store": str(first._host_log.parent / "stores")}
    settings = {"num_steps": 15, "every_steps": 4, "options": options, **whole}
    untouched = make_cluster("untouched", world_size=after, **settings)
    untouched.start()
    untouched.finish()
    victim = after - 1
    # The snapshot of step 11 waits for that of step 7: from then on all have one in common.
    deaths = {"1": ["forward", 7], "2": ["forward", 12], "3": ["forward", 13], "4": ["forward", 14]}
    cluster = make_cluster("killed", world_size=after, suicides={str(victim): deaths}, **settings)
    cluster.start()
    for _ in deaths:
        cluster.wait_for_death(victim)
        cluster.start(victim)
    cluster.finish()
    assert [event["step"] for event in untouched.events(0, "step")] == list(range(7, 16))
    assert cluster.events(0, "step")[-1]["step"] == 15
    assert end(cluster) == end(untouched)
    begun = [cluster.events(rank, "recovered")[0]["replicas"] for rank in cluster.ranks]
    assert joined(begun) == end(first)
    resumed = [event["step"] for event in cluster.recoveries(victim)]
    assert resumed[0] == 6
    assert resumed == sorted(resumed)
    assert resumed[-1] > 6
