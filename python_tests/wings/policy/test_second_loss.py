"""The chance of a second loss in a group: by hand, by enumeration, its limits and its order."""

import itertools
import math
from collections import Counter

import pytest

from cpr_ext.wings.policy import JobSize
from cpr_ext.wings.policy.second_loss import (
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


def test_without_a_window_only_failures_of_several_shards_fall_back():
    assert mean_hours_between_fallbacks(JobSize(1, 8), 10, 4, 0) == math.inf
    assert chance_of_fallback(JobSize(1, 8), 10, 4, 0) == 0
    # Two of eight at once: of one group of four with a chance of 3/7.
    assert mean_hours_between_fallbacks(JobSize(1, 8, 2), 10, 4, 0) == pytest.approx(70 / 3)
