"""The played groups: each rule by one short story."""

import pytest

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy import EmpiricalFailures, JobCosts, JobSize, ParityCosts
from cpr_ext.wings.policy.parity_simulation import PlayedGroups, simulate_parity

NOTHING = set()


def told(*losses):
    """What the store must serve after each loss; groups of four, an hour to be whole again."""
    groups = PlayedGroups(group_size=4, window_hours=1.0)
    return [groups.lose(hour, shards) for hour, shards in losses]


def test_a_second_loss_of_the_group_in_time_does():
    assert told((0.0, [0]), (0.9, [1])) == [NOTHING, {0, 1}]


def test_a_job_by_hand():
    """A failure every 10 h of a job of 35 h, always both workers: three fallbacks."""
    costs = JobCosts(0.5, 1.0, 0.25, 0.1)
    parity = ParityCosts(2, 0.02, 0.2, rebuild_stall=0.5)
    played = simulate_parity(
        costs, JobSize(35, 2, 2), parity, EmpiricalFailures((10.0,)), 8.0, histories=2
    )
    assert (played.failures, played.fallbacks, played.fallback_chance) == (3, 3, 1)
    assert played.pls == pytest.approx((2 + 4 + 6) / 35)  # since the saves at 8, 16 and 24 h
    overhead = played.overhead
    assert overhead.save_hours == pytest.approx(4 * 0.5)
    assert overhead.load_hours == pytest.approx(3 * (0.25 + 0.1))
    assert overhead.reschedule_hours == pytest.approx(0.3)
    assert overhead.parity_hours == pytest.approx(0.7)


def test_too_few_histories_are_refused():
    costs, parity = JobCosts(0.5, 1.0, 0.25, 0.1), ParityCosts(2, 0.02, 0.2)
    with pytest.raises(UsageError, match="histories is 1"):
        simulate_parity(costs, JobSize(35, 2), parity, EmpiricalFailures((10.0,)), 8, histories=1)
