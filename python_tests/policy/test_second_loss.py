"""The chance of a second loss in a group: by hand, by enumeration, its limits and its order."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.policy import JobSize
from cpr_ext.policy.second_loss import (
    chance_of_fallback,
    chance_together,
    mean_hours_between_fallbacks,
    second_loss,
)


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


def test_a_second_loss_by_hand():
    # 4,096 workers of 2,000 h each, 4 minutes: 1/128 * 1/30,720 of an hour's losses and so on.
    job, mtbf, window = JobSize(730, 4096), 2000 / 4096, 4 / 60
    for size, chance in ((2, 0.049), (4, 0.139), (8, 0.294)):
        mean_pairs = 730 / mtbf * (size - 1) * window / 2000
        found = chance_of_fallback(job, mtbf, size, window)
        assert found == pytest.approx(1 - math.exp(-mean_pairs), rel=1e-3)
        assert found == pytest.approx(chance, abs=0.001)


def test_a_replacement_that_is_lost_again_starts_the_time_anew():
    # Two workers, a window far longer than the MTBF: the other one is lost first or later, surely.
    loss = second_loss(JobSize(1000, 2), 1.0, 2, 50.0)
    assert loss.meanwhile == pytest.approx(1)
    assert loss.unprotected_hours == pytest.approx(2)  # losses every hour, half of them the other


@given(
    st.integers(2, 8),
    st.integers(1, 8),
    st.integers(1, 4),
    st.floats(0.1, 1e4),
    st.floats(0, 10),
)
def test_chances_are_chances_and_grow_with_the_window(size, groups, lost, mtbf, window):
    job = JobSize(100, size * groups, min(lost, size * groups))
    short, long = (second_loss(job, mtbf, size, hours) for hours in (window, 2 * window + 0.01))
    assert 0 <= short.together == long.together <= 1
    assert 0 <= short.meanwhile <= long.meanwhile <= 1
    assert short.unprotected_hours <= long.unprotected_hours
    assert short.chance <= 1
    assert 0 <= short.shards_lost <= job.num_shards
    assert mean_hours_between_fallbacks(job, mtbf, size, window) > 0


@given(st.integers(1, 12), st.floats(1, 1000), st.floats(0.001, 0.5))
def test_smaller_groups_fall_back_less_often(scale, mtbf, window):
    job = JobSize(100, 24 * scale)
    means = [mean_hours_between_fallbacks(job, mtbf, size, window) for size in (2, 3, 4, 8)]
    assert means == sorted(means, reverse=True)


def test_without_a_window_only_failures_of_several_shards_fall_back():
    assert mean_hours_between_fallbacks(JobSize(1, 8), 10, 4, 0) == math.inf
    assert chance_of_fallback(JobSize(1, 8), 10, 4, 0) == 0
    # Two of eight at once: of one group of four with a chance of 3/7.
    assert mean_hours_between_fallbacks(JobSize(1, 8, 2), 10, 4, 0) == pytest.approx(70 / 3)
