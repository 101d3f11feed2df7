"""Exact recovery of TorchRec's tables, whose rows change in the backward pass."""

import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

import torch

from cpr_ext.integrations.torchrec.sharded_tables import find_sharded_tables
from python_tests.distributed.cluster import Cluster
from python_tests.integrations.sharded_models import SAMPLES, PooledDlrm, make_batch, sharded

JOB = ("python_tests.integrations.planned_job", "PlannedJob")
# Nobody is taken for lost on a busy machine.
PATIENT = {"collective_seconds": 900.0, "join_seconds": 900.0}
STEPS = 9


@pytest.fixture
def make_cluster(torchrec_nursery, tmp_path):
    clusters = []

    def make(name, plan, **settings):
        clusters.append(Cluster(
            [torchrec_nursery], tmp_path / name, job=JOB, batch_size=2 * SAMPLES, world_size=2,
            num_steps=STEPS, recovery="exact", every_steps=4,
            time_outs=PATIENT, options={"plan": plan, "group_size": 2}, **settings,
        ))  # fmt: skip
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


def states(cluster):
    """By rank and step: digests of rows and their state, and the replicas."""
    return {
        (rank, event["step"]): (event["tables"], event["replicas"])
        for rank in cluster.ranks
        for event in cluster.events(rank, "step")
        if "tables" in event  # else rows are missing still
    }


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("plan", "rebuild_rate"),
    [
        ("row_wise", None),
        ("column_wise", None),
        ("table_wise", 1),
        long("table_wise", None),
        long("row_wise", 1),
        long("column_wise", 1),
    ],
)
def test_killed_workers_cost_nothing_under_each_plan(make_cluster, plan, rebuild_rate):
    """One dies in the backward pass, its rows half changed; then the other, after that pass."""
    untouched = make_cluster("untouched", plan)
    untouched.start()
    suicides = {"1": {"1": ["backward", 3]}, "0": {"1": ["reduced", 6]}}
    killed = make_cluster("killed", plan, suicides=suicides)
    killed.settings.options["rebuild_rate"] = rebuild_rate
    killed.start()
    for victim in (1, 0):
        killed.wait_for_death(victim)
        killed.start(victim)
    for cluster in (untouched, killed):
        cluster.finish()
    found, expected = states(killed), states(untouched)
    assert found == {at: known for at, known in expected.items() if at in found}
    assert all((rank, STEPS) in found for rank in killed.ranks)
    # Steps were trained while rows were missing, if they are rebuilt during training.
    assert (len(found) < len(expected)) == (rebuild_rate is not None)
    recoveries = [event["recovery"] for event in killed.recoveries(1)[1:]]
    assert [(r["recovery"], r["lost"], r["obstacle"]) for r in recoveries] == [
        ("exact", [1], ""),
        ("exact", [0], ""),
    ]
    for recovery in recoveries:
        assert set(recovery["samples_lost"]) == set(recovery["bytes_read"]) == {0}


def test_rows_are_reported_before_the_fused_optimizer_changes_them(alone):
    parallel, _ = sharded("table_wise", "rowwise_adagrad", model=PooledDlrm())
    tables = find_sharded_tables(parallel)
    before = {id(t): t.weight.clone() for t in tables}
    noted = {id(t): set() for t in tables}

    def note(table, row_ids):
        assert (row_ids.dtype, row_ids.dim()) == (torch.int64, 1)
        for row in row_ids.tolist():
            if row not in noted[id(table)]:
                assert torch.equal(table.weight[row], before[id(table)][row])
        noted[id(table)] |= set(row_ids.tolist())

    sources = {id(table.lookups): table.lookups for table in tables}
    handles = [handle for source in sources.values() for handle in source.watch_changes(note)]
    inputs, looked_up = make_batch(0)
    loss = parallel(*inputs)
    assert not any(noted.values())  # nothing changes in the forward pass
    loss.backward()
    for table in tables:
        name = table.name.split(".")[2]
        assert noted[id(table)] == set(looked_up[name].tolist())
        changed = (table.weight != before[id(table)]).any(1).nonzero().flatten().tolist()
        assert set(changed) <= noted[id(table)]
        assert changed
    for handle in handles:
        handle.remove()
    noted.clear()
    parallel(*inputs).backward()  # reports to nobody, else a KeyError


def test_an_error_before_the_change_leaves_the_rows_as_they_were(alone):
    parallel, _ = sharded("table_wise", "rowwise_adagrad", model=PooledDlrm())
    tables = find_sharded_tables(parallel)
    before = [table.weight.clone() for table in tables]

    def refuse(table, row_ids):
        raise LookupError("a peer was lost")

    for source in {id(table.lookups): table.lookups for table in tables}.values():
        source.watch_changes(refuse)
    with pytest.raises(LookupError, match="a peer was lost"):
        parallel(*make_batch(0)[0]).backward()
    for table, values in zip(tables, before, strict=True):
        assert torch.equal(table.weight, values)
