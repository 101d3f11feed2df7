"""Which rows go first: what a priority may be, and the trackers it makes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext import (
    AllRows,
    Checkpointer,
    EverySteps,
    LargestChange,
    MostFrequentlyUsed,
    StoreOptions,
    SubSampledUsed,
)
from cpr_ext._native import native
from cpr_ext.errors import UsageError
from cpr_ext.state.table import Table

PRIORITIES = {
    MostFrequentlyUsed: native.AccessCounter,
    SubSampledUsed: native.RowSampler,
    LargestChange: native.ChangeMeter,
    AllRows: native.DirtyRows,
}


@pytest.mark.parametrize("priority", PRIORITIES)
@given(fraction=st.floats(0, 1, exclude_min=True), num_rows=st.integers(1, 10**7))
def test_a_budget_is_the_fraction_rounded_up_so_that_it_is_never_nothing(
    priority, fraction, num_rows
):
    budget = priority(fraction=fraction).budget(num_rows)
    assert budget == math.ceil(fraction * num_rows)
    assert 1 <= budget <= num_rows


@pytest.mark.parametrize(("priority", "tracker"), PRIORITIES.items())
def test_each_priority_makes_its_tracker_for_a_table_and_refuses_wrong_fractions(priority, tracker):
    made = priority().make_tracker(Table("t", torch.zeros(40, 2)))
    assert (type(made), made.name, made.num_rows) == (tracker, "t", 40)
    assert priority().fraction == (1.0 if priority is AllRows else 0.125)  # of the paper
    for fraction in (0, -0.1, 1.0001, 2, float("nan"), float("inf")):
        told = f"{priority.__name__}: fraction is {fraction}; allowed"
        with pytest.raises(UsageError, match=told):
            priority(fraction=fraction)


def test_a_sampling_period_below_one_is_refused():
    assert SubSampledUsed().period == 2
    for period in (0, -2):
        with pytest.raises(UsageError, match=f"period is {period}; it must be at least 1"):
            SubSampledUsed(period=period)


def saved_rows(store, priority, batches):
    """Trains on each batch and takes a partial snapshot; the rows that a new process finds saved.

    Every lookup changes its row, so a row that is as in the base was not saved since.
    """

    def embeddings():
        model = torch.nn.EmbeddingBag(400, 2, mode="sum", sparse=True)
        torch.nn.init.zeros_(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    model, optimizer = embeddings()
    options = {"priority": priority, "schedule": EverySteps(10**9), "store": StoreOptions(None)}
    with Checkpointer(model, optimizer, store, **options) as ckpt:
        ckpt.recover()
        ckpt.save("base").wait_until_done()
        for batch in batches:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            ckpt.step(len(batch))
            ckpt.save("partial").wait_until_done()
    model, optimizer = embeddings()
    with Checkpointer(model, optimizer, store, **options) as ckpt:
        ckpt.recover()
        return (model.weight[:, 0] != 0).nonzero().flatten()


def test_every_row_is_saved_in_its_turn_where_all_change_at_every_step(tmp_path):
    everything = torch.arange(400).reshape(-1, 1)
    saved = saved_rows(tmp_path / "store", AllRows(0.125), [everything] * 8)
    assert saved.tolist() == list(range(400))


@pytest.mark.parametrize("period", [1, 2, 8, 2**40])
def test_a_budget_for_all_changed_rows_saves_them_all_whatever_was_sampled(tmp_path, period):
    changed = torch.arange(0, 400, 8).reshape(-1, 1)  # as many as the budget has
    saved = saved_rows(tmp_path / "store", SubSampledUsed(0.125, period=period), [changed])
    assert saved.tolist() == changed.flatten().tolist()


def test_rows_of_every_column_of_a_bag_are_sampled(tmp_path):
    """Users in the first column, items in the second; each looked up once per step."""
    bags = torch.stack([torch.arange(200), torch.arange(200, 400)], dim=1)
    saved = saved_rows(tmp_path / "store", SubSampledUsed(0.5), [bags] * 4)
    for column in (saved[saved < 200], saved[saved >= 200]):
        assert len(column) > 150
