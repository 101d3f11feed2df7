"""Expected cost of parity: by hand, and against histories that are played loss by loss."""

import pytest

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy import JobCosts, JobSize, ParityCosts
from cpr_ext.wings.policy.parity_expectation import expected_parity

COSTS = JobCosts(save_hours=0.1, load_hours=0.3, load_shard_hours=0.2, reschedule_hours=0.05)


def test_parts_by_hand():
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


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="does not fit 9 shards"):
        expected_parity(COSTS, JobSize(10, 9), ParityCosts(4, 0, 0), 10, 5)
