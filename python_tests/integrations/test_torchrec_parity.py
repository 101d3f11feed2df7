"""What an exact recovery needs of TorchRec's tables, whose rows change in the backward pass."""

import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

import torch

from cpr_ext.integrations.torchrec.sharded_tables import find_kernels, sharded_tables
from python_tests.integrations.sharded_models import PooledDlrm, make_batch, sharded


def test_rows_are_reported_before_the_fused_optimizer_changes_them(alone):
    parallel, _ = sharded("table_wise", "rowwise_adagrad", model=PooledDlrm())
    tables = sharded_tables(find_kernels(parallel))
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
    tables = sharded_tables(find_kernels(parallel))
    before = [table.weight.clone() for table in tables]

    def refuse(table, row_ids):
        raise LookupError("a peer was lost")

    for source in {id(table.lookups): table.lookups for table in tables}.values():
        source.watch_changes(refuse)
    with pytest.raises(LookupError, match="a peer was lost"):
        parallel(*make_batch(0)[0]).backward()
    for table, values in zip(tables, before, strict=True):
        assert torch.equal(table.weight, values)
