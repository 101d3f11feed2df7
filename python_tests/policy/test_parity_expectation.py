"""Expected cost of parity: by hand, and against histories that are played loss by loss."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.policy import ExponentialFailures, JobCosts, JobSize, ParityCosts, SavePattern
from cpr_ext.policy.expectation import expected_partial_recovery
from cpr_ext.policy.parity_expectation import expected_parity
from cpr_ext.policy.parity_simulation import simulate_parity

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


def test_parity_that_never_suffices_loses_what_partial_recovery_loses():
    """All shards at once: each failure falls back, with all of them."""
    job, parity = JobSize(100, 4, 4), ParityCosts(4, 0.0, 0.0)
    costs = replace(COSTS, reschedule_hours=0.0)
    found = expected_parity(costs, job, parity, 10, 20)
    partial = expected_partial_recovery(costs, job, 10, 20)
    assert found.fallbacks == found.failures
    assert found.pls == pytest.approx(partial.pls)
    assert found.overhead.total_hours == pytest.approx(partial.overhead.total_hours)


@pytest.mark.parametrize("clock", ["training", "running"])
@pytest.mark.parametrize(
    ("shards", "size", "lost", "mtbf", "rebuild"),
    [(8, 4, 1, 10, 0.3), (8, 2, 1, 4, 0.2), (16, 8, 1, 2, 0.1), (4096, 4, 1, 0.5, 0.05),
     (18, 3, 2, 10, 0.1)],
)  # fmt: skip
def test_it_is_the_mean_of_played_histories(shards, size, lost, mtbf, rebuild, clock):
    job, parity = JobSize(120 * mtbf, shards, lost), ParityCosts(size, 0.02, rebuild)
    given = (COSTS, job, parity)
    options = {"pattern": SavePattern(0.25, 0.25), "clock": clock}
    interval = 5 * mtbf
    expected = expected_parity(*given, mtbf, interval, **options)
    failures = ExponentialFailures(mtbf)
    played = simulate_parity(*given, failures, interval, **options, histories=300, seed=3)
    assert played.fallbacks == pytest.approx(expected.fallbacks, rel=0.15, abs=0.1)
    off = abs(played.fallback_chance - expected.fallback_chance)
    assert off <= 4 * played.chance_standard_error + 0.02 * expected.fallback_chance + 1e-3
    off = abs(played.overhead.total_hours - expected.overhead.total_hours)
    assert off <= 4 * played.total_standard_error_hours + 0.005 * expected.overhead.total_hours
    assert abs(played.pls - expected.pls) <= 4 * played.pls_standard_error + 0.1 * expected.pls


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(1, 6), st.floats(1, 100), st.floats(0, 1), st.floats(0.1, 50))
def test_parity_loses_less_than_partial_recovery_with_the_same_saves(
    size, groups, mtbf, rebuild, interval
):
    job, parity = JobSize(50, size * groups), ParityCosts(size, 0.0, rebuild)
    found = expected_parity(COSTS, job, parity, mtbf, interval)
    partial = expected_partial_recovery(COSTS, job, mtbf, interval)
    assert 0 <= found.fallbacks <= found.failures * (1 + 1e-9)
    assert found.pls <= found.fallbacks * partial.pls / found.failures * job.num_shards + 1e-12
    assert found.overhead.save_hours == partial.overhead.save_hours


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="does not fit 9 shards"):
        expected_parity(COSTS, JobSize(10, 9), ParityCosts(4, 0, 0), 10, 5)
