"""Parity: its costs by hand, and how often it does not suffice, by enumeration and by hand."""

import itertools
import math
from collections import Counter

import pytest

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy import JobCosts, JobSize, ParityCosts
from cpr_ext.wings.policy.parity import (
    chance_of_fallback,
    chance_together,
    expected_parity,
    extra_memory_share,
    mean_hours_between_fallbacks,
    rebuild_hours,
    second_loss,
)

COSTS = JobCosts(save_hours=0.1, load_hours=0.3, load_shard_hours=0.2, reschedule_hours=0.05)


def test_figures_by_hand():
    assert [extra_memory_share(g) for g in (2, 4, 8)] == [1, pytest.approx(1 / 3), 1 / 7]
    # 3 + 1: 36 GB decoded and 12 GB encoded at 1 GB/s.
    assert rebuild_hours(36e9, 4, 1e9) == pytest.approx(48 / 3600)
    assert ParityCosts(2, 0, 0).name == "mirror"
    assert ParityCosts(8, 0, 0).name == "7 + 1"


def test_expected_parts_by_hand():
    job, parity = JobSize(100, 8), ParityCosts(4, 0.03, 0.1, rebuild_stall=0.5)
    found = expected_parity(COSTS, job, parity, 10, 50)
    assert found.failures == 10
    assert found.overhead.parity_hours == pytest.approx(3)
    assert found.overhead.save_hours == pytest.approx(0.2)
    assert found.overhead.reschedule_hours == pytest.approx(0.5)
    assert found.overhead.lost_computation_hours == 0
    # 0.15 h unprotected, 3 of 8 shards, a failure in 10 h.
    assert found.fallbacks == pytest.approx(10 * 0.15 / 10 * 3 / 8, rel=0.01)
    assert found.overhead.load_hours == pytest.approx(10 * 0.05 + 0.2 * found.fallbacks)
    assert found.pls == pytest.approx(found.fallbacks * 0.25 * 2 / 8, rel=0.02)


@pytest.mark.parametrize(("shards", "size", "lost"), [(8, 4, 2), (12, 3, 4), (6, 2, 5), (8, 2, 1)])
def test_the_chance_that_one_failure_takes_two_of_a_group_is_that_of_all_its_cases(
    shards, size, lost
):
    cases = list(itertools.combinations(range(shards), lost))
    hits = sum(len({shard // size for shard in case}) < lost for case in cases)
    job = JobSize(1, shards, lost)
    assert chance_together(job, size) == pytest.approx(hits / len(cases))
    # Only the groups that lost two come from the store.
    groups = [Counter(shard // size for shard in case) for case in cases]
    unable = sum(count for case in groups for count in case.values() if count > 1)
    loss = second_loss(job, 10.0, size, 0.0)
    assert loss.shards_lost == pytest.approx(unable / hits if hits else 0)


def test_without_a_window_only_failures_of_several_shards_fall_back():
    assert mean_hours_between_fallbacks(JobSize(1, 8), 10, 4, 0) == math.inf
    assert chance_of_fallback(JobSize(1, 8), 10, 4, 0) == 0
    # Two of eight at once: of one group of four with a chance of 3/7.
    assert mean_hours_between_fallbacks(JobSize(1, 8, 2), 10, 4, 0) == pytest.approx(70 / 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"group_size": 1}, "group_size is 1"),
        ({"steady_share": -0.1}, "steady_share is -0.1"),
        ({"rebuild_hours": float("nan")}, "rebuild_hours is nan"),
        ({"rebuild_stall": 1.5}, "rebuild_stall is 1.5"),
    ],
)
def test_costs_out_of_range_are_named(change, named):
    with pytest.raises(UsageError, match=named):
        ParityCosts(**{"group_size": 4, "steady_share": 0.03, "rebuild_hours": 0.1, **change})


def test_groups_that_do_not_fit_are_refused_with_those_that_do():
    with pytest.raises(UsageError, match=r"possible here: \[2, 3, 6\]"):
        ParityCosts(4, 0, 0).require_fit(6)
    with pytest.raises(UsageError, match="does not fit 9 shards"):
        expected_parity(COSTS, JobSize(10, 9), ParityCosts(4, 0, 0), 10, 5)
