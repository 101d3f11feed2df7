"""Which rows go first: what a priority may be, and the trackers it makes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext import AllRows, LargestChange, MostFrequentlyUsed, SubSampledUsed
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
