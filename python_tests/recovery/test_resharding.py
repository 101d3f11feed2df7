"""Tables in parts, cut anew: any cut of stores into any cut of a model, without TorchRec."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpr_ext
from cpr_ext.errors import DamageError, StoreError, UsageError
from cpr_ext.state.table import Table
from cpr_ext.state.table_part import TablePart
from cpr_ext.wings.lab.dlrm.rowwise_adagrad import RowWiseAdagrad
from python_tests.helpers import flip

ROWS, DIM = 40, 6
OPTIMIZERS = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,  # makes its state at its first step
    "rowwise_adagrad": RowWiseAdagrad,
}


class Holder(torch.nn.Module):
    """Parts of table ``t`` as parameters, and a dense value."""

    def __init__(self, parts, optimizer="adagrad", seed=None):
        super().__init__()
        generator = torch.Generator().manual_seed(seed or 0)
        self.parts = torch.nn.ParameterList(
            torch.zeros(p.shape) if seed is None else torch.randn(p.shape, generator=generator)
            for p in parts
        )
        self.dense = torch.nn.Parameter(torch.full((2,), 0.0 if seed is None else float(seed)))
        of_rows = OPTIMIZERS[optimizer](list(self.parts)) if parts else None
        if of_rows is not None and seed is not None:
            for part in self.parts:
                part.grad = part.detach().sin()
            of_rows.step()
        self.tables = [
            Table(part.name, weight, of_rows, part=part)
            for part, weight in zip(parts, self.parts, strict=True)
        ]

    def checkpointer(self, directory, **options):
        # Every process has the same dense part, whatever parts of the table it holds.
        dense = torch.optim.SGD([self.dense], lr=0.1)
        return cpr_ext.Checkpointer(self, dense, directory, tables=self.tables, **options)


def bounds(draw, size):
    inner = draw(st.lists(st.integers(1, size - 1), max_size=3, unique=True))
    edges = [0, *sorted(inner), size]
    return list(pairwise(edges))


@st.composite
def cuts(draw, columns=None):
    """The table cut into a grid, its cells dealt to up to three processes."""
    columns = columns or bounds(draw, DIM)
    parts = [TablePart("t", r, c, ROWS, DIM) for r in bounds(draw, ROWS) for c in columns]
    owners = [draw(st.integers(0, 2)) for _ in parts]
    return [[p for p, owner in zip(parts, owners, strict=True) if owner == n] for n in range(3)]


def whole(holders, name):
    """The table laid together; state by row once per column."""
    table = torch.full((ROWS, DIM), float("nan"))
    for holder in holders:
        for live in holder.tables:
            array = live.arrays()[name]
            values = array if array.dim() == 2 else array[:, None].expand(live.part.shape)
            table[slice(*live.part.rows), slice(*live.part.columns)] = values
    return table


def saved(directory, cut, optimizer, **options):
    holders = []
    for number, parts in enumerate(cut):
        holder = Holder(parts, optimizer, seed=number + 1)
        with holder.checkpointer(directory / str(number), **options) as checkpointer:
            for _ in range(number + 1):  # each is at another step
                checkpointer.step()
            checkpointer.save("base").wait_until_done()
        holders.append(holder)
    return holders, [directory / str(number) for number in range(len(cut))]


@given(data=st.data())
@settings(max_examples=15)
def test_any_cut_is_taken_into_any_other_bit_for_bit(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("cuts")
    optimizer = data.draw(st.sampled_from(sorted(OPTIMIZERS)))
    old = data.draw(cuts())
    # State by row keeps its bits only where the columns are cut alike.
    alike = sorted({p.columns for parts in old for p in parts})
    new = data.draw(cuts(alike if optimizer == "rowwise_adagrad" else None))
    holders, stores = saved(directory, old, optimizer, num_shards=data.draw(st.integers(1, 3)))
    live = []
    for number, parts in enumerate(new):
        holder = Holder(parts, optimizer)
        with holder.checkpointer(directory / f"new-{number}") as checkpointer:
            report = checkpointer.recover(from_store=data.draw(st.permutations(stores)))
            assert report.differences == []
            assert report.step == 3  # where the newest dense part is
            assert torch.equal(holder.dense, holders[2].dense)
        live.append(holder)
    names = {tuple(table.array_names()) for holder in holders for table in holder.tables}
    assert names == {tuple(table.array_names()) for holder in live for table in holder.tables}
    assert [len(of_table) for of_table in names] == [3 if optimizer == "adam" else 2]
    for name in next(iter(names)):
        assert torch.equal(whole(live, name), whole(holders, name))


@given(data=st.data())
@settings(max_examples=15)
def test_a_part_that_no_store_holds_is_missed_and_nothing_is_changed(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("cuts")
    old = data.draw(cuts())
    _, stores = saved(directory, old, "adagrad")
    lost = data.draw(st.integers(0, 2))
    holder = Holder([TablePart("t", (0, ROWS), (0, DIM), ROWS, DIM)])
    with holder.checkpointer(directory / "new") as checkpointer:
        left = [store for number, store in enumerate(stores) if number != lost]
        if not old[lost]:
            checkpointer.recover(from_store=left)
            return
        with pytest.raises(StoreError, match="is not, or not as a whole, in the stores"):
            checkpointer.recover(from_store=left)
        assert not holder.parts[0].any()
        report = checkpointer.recover(from_store=left, strict=False)
        assert len(report.differences) >= 1
        for part in old[lost]:
            assert not holder.parts[0][slice(*part.rows), slice(*part.columns)].any()


def halves():
    return [[TablePart("t", rows, (0, DIM), ROWS, DIM)] for rows in ((0, 10), (10, ROWS))]


def test_what_has_no_state_in_common_or_is_damaged_is_refused_or_falls_back_as_asked(tmp_path):
    _, stores = saved(tmp_path, halves(), "adagrad")  # after one step, and after two
    (segment,) = sorted((stores[1] / "segments").glob("*-base.safetensors"))[-1:]
    flip(segment, segment.stat().st_size - 1)
    holder = Holder([TablePart("t", (0, ROWS), (0, DIM), ROWS, DIM)])
    with holder.checkpointer(tmp_path / "new") as checkpointer:
        for options, error, told in (
            ({"from_store": []}, UsageError, "empty list"),
            ({"from_store": [*stores, stores[1]]}, StoreError, "is in two of the stores"),
            ({"from_store": stores, "mode": "full"}, StoreError, "no step at which every one of"),
            ({"from_store": stores, "on_damage": "raise"}, DamageError, "-base"),
        ):
            with pytest.raises(error, match=told):
                checkpointer.recover(**options)
        assert not holder.parts[0].any()
        report = checkpointer.recover(from_store=stores)
        assert [damaged.path for damaged in report.damaged_segments] == [segment]
    with pytest.raises(UsageError, match="has shape"):
        Table("t", torch.zeros(3, DIM), part=holder.tables[0].part)


def test_maps_that_do_not_say_which_process_has_an_id_are_not_cut_otherwise(tmp_path):
    def job(store, rows, part=None):
        bag = torch.nn.EmbeddingBag(rows, 2, mode="sum", sparse=True)
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
        keys = torch.arange(rows)
        table = cpr_ext.Table("t", bag.weight, optimizer, [bag], part=part, keys=keys)
        return cpr_ext.Checkpointer(bag, optimizer, store, tables=[table])

    stores = [tmp_path / "0", tmp_path / "1"]
    for rank, store in enumerate(stores):
        ckpt = job(store, 4, TablePart("t", (4 * rank, 4 * rank + 4), (0, 2), 8, 2))
        ckpt.step()
        ckpt.close()
    whole = job(tmp_path / "whole", 8)
    before = whole.tables[0].weight.clone()
    with pytest.raises(StoreError, match="how many there are, in a way that is not known"):
        whole.recover(from_store=stores)
    assert torch.equal(whole.tables[0].weight, before)
    whole.close()
