"""What parity cannot protect is refused by name before training."""

from contextlib import nullcontext

import pytest
import torch

from cpr_ext.distributed import Identity, Parity, Worker
from cpr_ext.distributed.parity import refusals
from cpr_ext.distributed.parity.refusals import refuse_unprotected, require_memory
from cpr_ext.errors import UsageError
from cpr_ext.state.table import Table


def refused(says):
    return nullcontext() if says is None else pytest.raises(UsageError, match=says)


def table_of(optimizer="SGD", rows=1000, **options):
    weight = torch.nn.Parameter(torch.zeros(rows, 8))
    make = optimizer and getattr(torch.optim, optimizer)
    return Table("items", weight, make and make([weight], lr=0.1, **options))


def limited():
    bag = torch.nn.EmbeddingBag(10, 8, max_norm=1.0, sparse=True)
    return Table("items", bag.weight, torch.optim.SGD([bag.weight], lr=0.1), [bag])


FUSED = table_of()
FUSED.lookups = object()
NEVER_CHANGED = table_of(None)
NEVER_CHANGED.weight.requires_grad_(False)


EVERY_ROW = "changes every row.*Use SGD without mom"


@pytest.mark.parametrize(
    ("table", "on_gpu", "rate", "says"),
    [
        *((table_of(name), False, None, None) for name in ("SGD", "Adagrad", "SparseAdam")),
        (table_of("Adam", 100_000), False, None, EVERY_ROW),
        (table_of("SGD", 100_000, momentum=0.9), False, None, EVERY_ROW),
        (table_of("Adagrad", 100_000, weight_decay=0.1), False, None, EVERY_ROW),
        (table_of("Adam"), False, None, None),  # a small one
        (limited(), False, None, "has a max_norm"),
        (table_of(None), False, None, "no torch optimizer updates it"),
        (NEVER_CHANGED, False, None, None),
        (table_of(), True, None, None),
        (table_of(), True, 1, "on a GPU.*leave out rebuild_bytes"),
        (FUSED, True, None, "on a GPU.*keep them in CPU"),
    ],
)
def test_tables_that_parity_cannot_protect_are_refused(monkeypatch, table, on_gpu, rate, says):
    if on_gpu:
        monkeypatch.setattr(refusals, "device_of", lambda tensor: 0)
    with refused(says and f"table 'items'.*{says}"):
        refuse_unprotected([table], Parity(rebuild_bytes_per_second=rate, delta_bytes=8 * 32_000))


KEYED = Table("items", torch.nn.Parameter(torch.zeros(1000, 8)), keys=torch.full((1000,), -1))


@pytest.mark.parametrize(
    ("table", "size", "on_gpu", "needed"),
    [
        (table_of("Adagrad", 10_000), 3, False, 10_000 * 32 + 5 * 1000),  # half of rows and state
        (table_of(), 2, True, 1000 * 32 + 5 * 1000 + 1000 * 32),  # parity, deltas, copies
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
    with refused(f"needs up to {needed} bytes.*{needed - 1} are"):
        require_memory([table], parity)
    monkeypatch.undo()
    monkeypatch.setattr(refusals, "_MEMORY", tmp_path / "none")
    assert refusals.free_bytes() is None


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
        ("exact", {"group_size": 1}, "must be"),
        ("exact", {"group_size": 2, "delta_bytes": 0}, "must be"),
        ("exact", {"rebuild_bytes_per_second": 0}, "rebuild_bytes_per_second"),
        ("exact", {"every_steps": 2, "rebuild_bytes_per_second": 1}, "with every_steps=1, not 2"),
    ],
)
def test_parity_goes_with_a_job_that_it_fits_and_that_uses_it(tmp_path, recovery, parity, says):
    identity = Identity(0, 4, "localhost", 1, secret="known to the workers of this job only")
    with refused(says):
        given = None if parity is None else Parity(**parity)
        Worker(identity, tmp_path, recovery=recovery, parity=given)
