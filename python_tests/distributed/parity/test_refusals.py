"""What parity cannot protect is refused by name before training."""

import pytest
import torch

from cpr_ext.distributed import Identity, Parity, Worker
from cpr_ext.distributed.parity import refusals
from cpr_ext.distributed.parity.refusals import refuse_unprotected, require_memory
from cpr_ext.errors import UsageError
from cpr_ext.state.table import Table

OPTIMIZERS = {
    "SGD": lambda rows: torch.optim.SGD(rows, lr=0.1),
    "Adagrad": lambda rows: torch.optim.Adagrad(rows, lr=0.1),
    "SparseAdam": lambda rows: torch.optim.SparseAdam(rows, lr=0.1),
    "Adam": lambda rows: torch.optim.Adam(rows, lr=0.1),
    "momentum": lambda rows: torch.optim.SGD(rows, lr=0.1, momentum=0.9),
    "weight decay": lambda rows: torch.optim.Adagrad(rows, lr=0.1, weight_decay=0.1),
}


def table_of(optimizer, rows=1000):
    weight = torch.nn.Parameter(torch.zeros(rows, 8))
    return Table("items", weight, optimizer and OPTIMIZERS[optimizer]([weight]))


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "SparseAdam"])
def test_optimizers_that_change_looked_up_rows_are_protected(optimizer):
    refuse_unprotected([table_of(optimizer)], Parity(delta_bytes=1))


@pytest.mark.parametrize("optimizer", ["Adam", "momentum", "weight decay"])
def test_an_optimizer_that_changes_every_row_is_refused_on_a_large_table(optimizer):
    small, large = table_of(optimizer), table_of(optimizer, 100_000)
    parity = Parity(delta_bytes=8 * small.weight.nbytes)
    refuse_unprotected([small], parity)
    with pytest.raises(UsageError, match=r"table 'items'.*changes every row.*Use SGD without mom"):
        refuse_unprotected([small, large], parity)


def test_a_table_whose_norms_the_forward_pass_limits_is_refused():
    module = torch.nn.EmbeddingBag(10, 8, max_norm=1.0, sparse=True)
    table = Table("items", module.weight, OPTIMIZERS["SGD"]([module.weight]), [module])
    with pytest.raises(UsageError, match=r"table 'items'.*has a max_norm"):
        refuse_unprotected([table], Parity())


def test_tables_that_something_else_updates_are_refused():
    table = table_of(None)
    with pytest.raises(UsageError, match="no torch optimizer updates it"):
        refuse_unprotected([table], Parity())
    table.weight.requires_grad_(False)  # nothing changes it
    refuse_unprotected([table], Parity())
    fused = table_of("SGD")
    fused.lookups = object()
    with pytest.raises(UsageError, match=r"fused kernel changes it, and its object does not say"):
        refuse_unprotected([fused], Parity())


@pytest.mark.parametrize(
    ("has_lookups", "rate", "says"),
    [(False, None, None), (False, 1, "leave out rebuild_bytes"), (True, None, "keep them in CPU")],
)
def test_what_was_not_tested_of_tables_on_a_gpu_is_refused(monkeypatch, has_lookups, rate, says):
    monkeypatch.setattr(refusals, "device_of", lambda tensor: 0)
    table = table_of("SGD")
    table.lookups = object() if has_lookups else None
    parity = Parity(rebuild_bytes_per_second=rate)
    if says is None:
        return refuse_unprotected([table], parity)
    with pytest.raises(UsageError, match=rf"table 'items'.*on a GPU.*{says}"):
        refuse_unprotected([table], parity)


def test_copies_of_rows_on_a_gpu_take_memory(monkeypatch):
    needed = 1000 * 32 + 5 * 1000 + 1000 * 32  # parity of a mirror, deltas, copies
    monkeypatch.setattr(refusals, "device_of", lambda tensor: 0)
    monkeypatch.setattr(refusals, "free_bytes", lambda: needed - 1)
    with pytest.raises(UsageError, match=f"needs up to {needed} bytes"):
        require_memory([table_of("SGD")], Parity(group_size=2, delta_bytes=1000))


def test_a_machine_without_the_memory_is_refused(monkeypatch):
    table = table_of("Adagrad", 10_000)
    rows = 2 * table.weight.nbytes
    parity = Parity(group_size=3, delta_bytes=1000)
    for free, is_refused in ((rows // 2 + 5000, False), (rows // 2 + 4999, True), (None, False)):
        monkeypatch.setattr(refusals, "free_bytes", lambda free=free: free)
        if not is_refused:
            require_memory([table], parity)
            continue
        with pytest.raises(UsageError, match=rf"needs up to {rows // 2 + 5000} bytes.*{free} are"):
            require_memory([table], parity)


def test_copies_of_keys_take_memory(monkeypatch):
    keyed = Table("items", torch.nn.Parameter(torch.zeros(1000, 8)), keys=torch.full((1000,), -1))
    needed = 1000 * (32 + 8) + 5 * 1000 + 1000 * 8  # parity of a mirror, deltas, copies
    monkeypatch.setattr(refusals, "free_bytes", lambda: needed - 1)
    with pytest.raises(UsageError, match=f"needs up to {needed} bytes"):
        require_memory([keyed], Parity(group_size=2, delta_bytes=1000))


def test_this_machine_says_how_much_memory_is_free(monkeypatch, tmp_path):
    assert refusals.free_bytes() > 0
    monkeypatch.setattr(refusals, "_MEMORY", tmp_path / "none")
    assert refusals.free_bytes() is None


@pytest.mark.parametrize("options", [{"group_size": 1}, {"group_size": 2, "delta_bytes": 0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(UsageError, match="must be"):
        Parity(**options)


def worker(tmp_path, **options):
    identity = Identity(0, 4, "localhost", 1, secret="known to the workers of this job only")
    return Worker(identity, tmp_path, **options)


def test_a_worker_refuses_groups_that_do_not_fit_before_it_joins(tmp_path):
    with pytest.raises(UsageError, match=r"4 workers.*possible here: \[2, 4\]"):
        worker(tmp_path, recovery="exact", parity=Parity(group_size=3))
    with pytest.raises(UsageError, match="names 3 hosts"):
        worker(tmp_path, recovery="exact", parity=Parity(hosts=["a", "b", "c"]))


def test_parity_goes_with_the_recoveries_that_use_it(tmp_path):
    for recovery in ("exact", "partial"):
        worker(tmp_path, recovery=recovery, parity=Parity())
    with pytest.raises(UsageError, match='"exact" needs parity='):
        worker(tmp_path, recovery="exact")
    for recovery in ("full", "auto"):
        with pytest.raises(UsageError, match=f'parity= is of no use with recovery="{recovery}"'):
            worker(tmp_path, recovery=recovery, parity=Parity())
    with pytest.raises(UsageError, match="exact"):
        worker(tmp_path, recovery="never")
