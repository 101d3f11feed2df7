"""Groups while failures strike: their rule by a short story, and the formulas by histories."""

import numpy as np
import pytest

from cpr_ext.wings.lab.emulation.parity_groups import PlayedGroups
from cpr_ext.wings.policy import JobSize
from cpr_ext.wings.policy.parity import mean_hours_between_fallbacks, second_loss


def test_a_second_loss_of_the_group_in_time_is_served_by_the_store():
    groups = PlayedGroups(group_size=4, window_hours=1.0)
    losses = [(0.0, [0]), (0.9, [4]), (0.95, [1]), (5.0, [0]), (6.1, [1]), (6.2, [0]), (6.3, [2])]
    served = [set(), set(), {0, 1}, set(), set(), {0, 1}, {2}]  # at last, no parity is whole yet
    assert [groups.lose(*loss) for loss in losses] == served


@pytest.mark.parametrize(("shards", "size", "lost"), [(8, 4, 1), (16, 4, 2), (12, 2, 3)])
def test_the_formulas_are_what_histories_come_to(shards, size, lost):
    """A failure every hour, groups that are whole again after 0.2 h."""
    rng, window, hours = np.random.default_rng(3), 0.2, 60_000
    groups = PlayedGroups(size, window)
    served = []
    for hour in np.cumsum(rng.exponential(1.0, hours)).tolist():
        taken = rng.choice(shards, lost, replace=False).tolist()
        if found := groups.lose(hour, taken):
            served.append(len(found))
    job = JobSize(hours, shards, lost)
    between = mean_hours_between_fallbacks(job, 1.0, size, window)
    assert hours / len(served) == pytest.approx(between, rel=0.1)
    assert np.mean(served) == pytest.approx(
        second_loss(job, 1.0, size, window).shards_lost, rel=0.1
    )
