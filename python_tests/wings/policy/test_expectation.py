"""Overhead by the paper's formulas and as expected: by hand, the abstract's, and always."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy import (
    JobCosts,
    JobSize,
    Overhead,
    expected_pls,
    full_recovery,
    interval_for_pls,
    partial_recovery,
    young_interval_hours,
)
from cpr_ext.wings.policy.expectation import best_full_interval_hours, expected_full_recovery

# By hand: 100 h, a failure every 25 h, 0.5 h per save, every 5 h.
JOB = JobSize(100, 10)
COSTS = JobCosts(save_hours=0.5, load_hours=0.3, load_shard_hours=0.1, reschedule_hours=0.2)


def test_full_recovery_by_hand():
    overhead = full_recovery(COSTS, JOB, 25, 5)
    # 20 saves of 0.5; 4 failures: 0.3 load, half of 5 lost, 0.2 rescheduling each.
    assert vars(overhead) == pytest.approx(
        {
            "save_hours": 10,
            "load_hours": 1.2,
            "lost_computation_hours": 10,
            "reschedule_hours": 0.8,
            "parity_hours": 0,
        }
    )
    assert overhead.total_hours == pytest.approx(22)
    assert overhead.fraction_of(JOB) == pytest.approx(0.22)
    assert young_interval_hours(0.5, 25) == 5  # saves cost as much as what is lost


def test_partial_recovery_by_hand():
    overhead = partial_recovery(COSTS, JOB, 25, 5)
    assert vars(overhead) == pytest.approx(
        {
            "save_hours": 10,
            "load_hours": 0.4,
            "lost_computation_hours": 0,
            "reschedule_hours": 0.8,
            "parity_hours": 0,
        }
    )


@pytest.mark.parametrize(
    ("save_minutes", "recover_minutes", "full", "partial", "cpr"),
    [(5.0, 8.3, 8.21, 4.35, 0.68), (5.6, 5.4, 8.49, 4.40, 0.53)],
)
def test_the_figures_of_the_abstract_follow_from_costs(
    save_minutes, recover_minutes, full, partial, cpr
):
    """The paper publishes 8.2-8.5 % -> 0.53-0.68 %; the inputs are derived, not published."""
    job, mtbf = JobSize(56, 8), 28
    costs = JobCosts(save_minutes / 60, recover_minutes / 60, recover_minutes / 60, 0)
    young = young_interval_hours(costs.save_hours, mtbf)
    rare = interval_for_pls(job, mtbf, 0.1)
    percent = [
        100 * full_recovery(costs, job, mtbf, young).fraction_of(job),
        100 * partial_recovery(costs, job, mtbf, young).fraction_of(job),
        100 * partial_recovery(costs, job, mtbf, rare).fraction_of(job),
    ]
    assert percent == pytest.approx([full, partial, cpr], abs=0.006)
    assert expected_pls(job, mtbf, rare) == pytest.approx(0.1)


hours = st.floats(1e-3, 1e3)
costs = st.builds(JobCosts, hours, hours, hours, hours)


@pytest.mark.parametrize(
    ("total", "mtbf", "interval"), [(500, 20, 2), (56, 28, 44.8), (50, 10, 9), (100, 28, 150)]
)
def test_full_recovery_is_expected_as_histories_come_to(total, mtbf, interval):
    """Each failure, at any moment, repeats what was trained since the last whole save."""
    rng, job = np.random.default_rng(0), JobSize(total, 8)
    played = []
    for _ in range(4000):
        times = rng.uniform(0, total, rng.poisson(total / mtbf))
        lost = (times - np.floor(times / interval) * interval).sum()
        played.append(total // interval * 0.5 + len(times) * 0.5 + lost)
    expected = expected_full_recovery(COSTS, job, mtbf, interval).overhead.total_hours
    assert abs(np.mean(played) - expected) < 4 * np.std(played) / 4000**0.5


@given(costs, st.floats(1, 500), st.floats(0.5, 200), st.integers(1, 60))
def test_no_number_of_saves_is_better_than_the_best(costs, total, mtbf, saves):
    job = JobSize(total, 8)

    def cost(interval):
        return expected_full_recovery(costs, job, mtbf, interval).overhead.total_hours

    best = best_full_interval_hours(costs, job, mtbf)
    assert best <= total
    assert cost(best) <= cost(total / saves) * (1 + 1e-9)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("field", list(vars(COSTS)))
def test_costs_that_cannot_be_are_refused_with_name_and_value(field, bad):
    with pytest.raises(UsageError, match=f"{field} is {bad}"):
        replace(COSTS, **{field: bad})


def test_jobs_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="save_hours is 0; it must be above 0"):
        replace(COSTS, save_hours=0)
    with pytest.raises(UsageError, match="total_hours is -1"):
        JobSize(-1, 8)
    with pytest.raises(UsageError, match="num_shards is 0"):
        JobSize(1, 0)
    with pytest.raises(UsageError, match=r"shards_per_failure is 9.* at most all 8 shards"):
        JobSize(1, 8, 9)
    with pytest.raises(UsageError, match="mtbf_hours is 0"):
        full_recovery(COSTS, JOB, 0, 1)
    with pytest.raises(UsageError, match="interval_hours is -1"):
        partial_recovery(COSTS, JOB, 1, -1)
    with pytest.raises(UsageError, match="lost_computation_hours is -1"):
        Overhead(1, 1, -1, 1)
