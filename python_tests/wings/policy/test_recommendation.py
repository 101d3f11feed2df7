"""Full recovery, CPR, parity or both: each is recommended where it is right."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy import (
    JobCosts,
    JobSize,
    ParityCosts,
    Planner,
)

COSTS = JobCosts(0.1, 0.1, 0.05, 0.05)
PARITY = ParityCosts(4, steady_share=0.02, rebuild_hours=0.02)


def plan(target, *, parity=PARITY, costs=COSTS, shards=8, mtbf=28.0, hours=56.0, **options):
    return Planner(JobSize(hours, shards), costs, mtbf, parity=parity, **options).plan(target)


def test_parity_where_little_may_be_lost():
    made = plan(1e-4)
    assert made.recommended.name == "parity"
    assert made.recommended.recovery == "exact"
    assert made.reason.startswith("Keep parity in peers' memory, and save all rows every")


def test_both_where_two_losses_of_a_group_are_likely():
    made = plan(0.004, shards=1024, mtbf=1.0, hours=720, parity=replace(PARITY, group_size=8))
    assert made.recommended.fallback_chance > 0.01
    assert made.recommended.name == "parity + CPR"
    assert made.reason.startswith("Keep parity in peers' memory, and keep CPR's snapshots every")


@settings(deadline=None, max_examples=60)
@given(
    st.floats(1e-5, 1),
    st.floats(0, 0.2),
    st.floats(0, 1),
    st.sampled_from([2, 4, 8]),
    st.floats(1, 200),
)
def test_the_recommended_strategy_costs_least_and_keeps_to_the_target(
    target, steady, rebuild, size, mtbf
):
    parity = ParityCosts(size, steady, rebuild)
    made = plan(target, parity=parity, mtbf=mtbf)
    without = plan(target, parity=None, mtbf=mtbf)
    assert made.strategies[:6] == without.strategies
    alone, before_cpr = made.strategies[6:]
    assert (alone.name, before_cpr.name) == ("parity", "parity + CPR")
    assert made.recommended.overhead_fraction <= without.recommended.overhead_fraction
    for one in (alone, before_cpr):
        assert one.overhead_fraction >= steady
        assert one.interval_hours <= made.job.total_hours
    assert alone.expected.pls <= target * (1 + 1e-6)


def test_groups_that_do_not_fit_the_shards_are_refused_before_planning():
    with pytest.raises(UsageError, match="does not fit 9 shards"):
        plan(0.1, shards=9)
