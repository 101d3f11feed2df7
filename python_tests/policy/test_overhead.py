"""The paper's formulas: figures worked by hand, the abstract's, and what must always hold."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.policy import (
    JobCosts,
    JobSize,
    Overhead,
    expected_pls,
    full_recovery,
    interval_for_pls,
    partial_recovery,
    young_interval_hours,
)

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
jobs = st.builds(JobSize, st.floats(1, 1e4), st.just(8))


@given(costs, jobs, hours, hours)
def test_partial_recovery_saves_exactly_what_is_lost_and_not_loaded(costs, job, mtbf, interval):
    costs = replace(costs, load_shard_hours=costs.load_hours / 8)
    full = full_recovery(costs, job, mtbf, interval)
    partial = partial_recovery(costs, job, mtbf, interval)
    assert partial.save_hours == full.save_hours
    assert partial.total_hours <= full.total_hours
    assert partial.lost_computation_hours == 0


@given(costs, jobs, hours, hours, st.floats(1.01, 10))
def test_more_failures_and_dearer_parts_cost_more(costs, job, mtbf, interval, factor):
    for rule in (full_recovery, partial_recovery):
        usual = rule(costs, job, mtbf, interval).total_hours
        assert rule(costs, job, mtbf / factor, interval).total_hours > usual
        for part in ("save_hours", "reschedule_hours"):
            dearer = replace(costs, **{part: getattr(costs, part) * factor})
            assert rule(dearer, job, mtbf, interval).total_hours > usual


@given(costs, jobs, hours, st.floats(0.05, 20))
def test_no_interval_is_better_than_youngs(costs, job, mtbf, factor):
    young = young_interval_hours(costs.save_hours, mtbf)
    best = full_recovery(costs, job, mtbf, young).total_hours
    assert full_recovery(costs, job, mtbf, young * factor).total_hours >= best * (1 - 1e-12)


@given(costs, jobs, hours, hours, st.sampled_from([60.0, 1 / 24]))
def test_the_share_does_not_depend_on_the_unit_of_time(costs, job, mtbf, interval, unit):
    scaled = JobCosts(**{name: value * unit for name, value in vars(costs).items()})
    scaled_job = JobSize(job.total_hours * unit, job.num_shards)
    for rule in (full_recovery, partial_recovery):
        assert rule(scaled, scaled_job, mtbf * unit, interval * unit).fraction_of(
            scaled_job
        ) == pytest.approx(rule(costs, job, mtbf, interval).fraction_of(job))


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
