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


LIMITED = torch.nn.EmbeddingBag(10, 8, max_norm=1.0, sparse=True)


def limited():
    return Table("items", LIMITED.weight, OPTIMIZERS["SGD"]([LIMITED.weight]), [LIMITED])


def fused():
    table = table_of("SGD")
    table.lookups = object()
    return table


@pytest.mark.parametrize(
    ("table", "on_gpu", "rate", "says"),
    [
        *((table_of(name), False, None, None) for name in ("SGD", "Adagrad", "SparseAdam")),
        *(
            (table_of(name, 100_000), False, None, "changes every row.*Use SGD without mom")
            for name in ("Adam", "momentum", "weight decay")
        ),
        (table_of("Adam"), False, None, None),  # a small one
        (limited(), False, None, "has a max_norm"),
        (table_of(None), False, None, "no torch optimizer updates it"),
        (table_of("SGD"), True, None, None),
        (table_of("SGD"), True, 1, "on a GPU.*leave out rebuild_bytes"),
        (fused(), True, None, "on a GPU.*keep them in CPU"),
    ],
)
def test_tables_that_parity_cannot_protect_are_refused(monkeypatch, table, on_gpu, rate, says):
    if on_gpu:
        monkeypatch.setattr(refusals, "device_of", lambda tensor: 0)
    parity = Parity(rebuild_bytes_per_second=rate, delta_bytes=8 * 32_000)
    if says is None:
        return refuse_unprotected([table], parity)
    with pytest.raises(UsageError, match=rf"table 'items'.*{says}"):
        refuse_unprotected([table], parity)


def test_a_table_that_nothing_changes_is_protected():
    table = table_of(None)
    table.weight.requires_grad_(False)
    refuse_unprotected([table], Parity())


KEYED = Table("items", torch.nn.Parameter(torch.zeros(1000, 8)), keys=torch.full((1000,), -1))


@pytest.mark.parametrize(
    ("table", "size", "on_gpu", "needed"),
    [
        (table_of("Adagrad", 10_000), 3, False, 10_000 * 32 + 5 * 1000),  # half of rows and state
        (table_of("SGD"), 2, True, 1000 * 32 + 5 * 1000 + 1000 * 32),  # parity, deltas, copies
        (KEYED, 2, False, 1000 * (32 + 8) + 5 * 1000 + 1000 * 8),
    ],
)
def test_a_machine_without_the_memory_is_refused(
    monkeypatch, tmp_path, table, size, on_gpu, needed
):
    assert refusals.free_bytes() > 0
    if on_gpu:
        monkeypatch.setattr(refusals, "device_of", lambda tensor: 0)
    parity = Parity(group_size=size, delta_bytes=1000)
    for free in (needed, None):
        monkeypatch.setattr(refusals, "free_bytes", lambda free=free: free)
        require_memory([table], parity)
    monkeypatch.setattr(refusals, "free_bytes", lambda: needed - 1)
    with pytest.raises(UsageError, match=rf"needs up to {needed} bytes.*{needed - 1} are"):
        require_memory([table], parity)
    monkeypatch.undo()
    monkeypatch.setattr(refusals, "_MEMORY", tmp_path / "none")
    assert refusals.free_bytes() is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group_size": 1}, "must be"),
        ({"group_size": 2, "delta_bytes": 0}, "must be"),
        ({"rebuild_bytes_per_second": 0}, "rebuild_bytes_per_second"),
        ({"every_steps": 2, "rebuild_bytes_per_second": 1}, "goes with every_steps=1, not 2"),
    ],
)
def test_options_out_of_range_are_refused(options, says):
    with pytest.raises(UsageError, match=says):
        Parity(**options)


@pytest.mark.parametrize(
    ("recovery", "parity", "says"),
    [
        ("exact", {}, None),
        ("partial", {}, None),
        ("exact", {"group_size": 3}, r"4 workers.*possible here: \[2, 4\]"),
        ("exact", {"hosts": ["a", "b", "c"]}, "names 3 hosts"),
        ("exact", None, '"exact" needs parity='),
        ("full", {}, 'parity= is of no use with recovery="full"'),
        ("never", None, "exact"),
    ],
)
def test_parity_goes_with_a_job_that_it_fits_and_that_uses_it(tmp_path, recovery, parity, says):
    identity = Identity(0, 4, "localhost", 1, secret="known to the workers of this job only")
    options = {"recovery": recovery, "parity": None if parity is None else Parity(**parity)}
    if says is None:
        Worker(identity, tmp_path, **options)
        return
    with pytest.raises(UsageError, match=says):
        Worker(identity, tmp_path, **options)
