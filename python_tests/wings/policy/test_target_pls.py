"""TargetPLS: its interval is the formula's, it plans again when costs change, and says so."""

import logging
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext import EverySteps, TargetPLS
from cpr_ext.errors import UsageError
from cpr_ext.saving.schedules import Progress, RunCosts
from cpr_ext.wings.policy import JobCosts, JobSize, ParityCosts
from cpr_ext.wings.policy.parity import expected_parity

START = RunCosts(num_shards=8, fraction=0.125)
MEASURED = replace(
    START,
    prioritized_bytes=99e9,
    other_bytes=1e9,
    samples_per_hour=1e9,
    save_hours=0.01,
    load_hours=0.02,
    load_shard_hours=0.003,
)


def observed(schedule, *costs):
    for cost in costs:
        schedule.observe(cost)
    return schedule


def test_the_interval_by_hand():
    assert not TargetPLS(0.02, mtbf_hours=28).is_due(Progress(10**9, 1e9))  # it has not begun
    # 2 * 0.02 * 8 * 28 = 8.96 h for all rows, an eighth of them every 1.12 h.
    schedule = observed(TargetPLS(0.02, mtbf_hours=28), START)
    assert schedule.interval_hours == pytest.approx(1.12)
    assert not schedule.is_due(Progress(10**9, 1.11 * 3600))
    assert schedule.is_due(Progress(1, 1.13 * 3600))
    # Two shards per failure: twice as often.
    schedule = observed(TargetPLS(0.02, mtbf_hours=28, shards_per_failure=2), START)
    assert schedule.interval_hours == pytest.approx(0.56)


def test_a_short_job_saves_no_more_often_than_it_needs():
    schedule = observed(TargetPLS(0.02, mtbf_hours=28, total_hours=4), START)
    assert schedule.interval_hours == pytest.approx(0.5)
    # The length of the job follows from the speed that is measured.
    schedule = TargetPLS(0.02, mtbf_hours=28, total_samples=4 * 10**9)
    assert observed(schedule, START).interval_hours == pytest.approx(1.12)
    assert observed(schedule, MEASURED).interval_hours == pytest.approx(0.5)
    faster = replace(MEASURED, samples_per_hour=2e9)
    assert observed(schedule, faster).interval_hours == pytest.approx(0.25)


def test_it_plans_with_measured_costs_and_again_only_when_they_change():
    schedule = observed(TargetPLS(0.02, mtbf_hours=28), START)
    assert schedule.plan is None
    first = observed(schedule, MEASURED).plan
    assert vars(first.costs) == {
        "save_hours": 0.01,
        "load_hours": 0.02,
        "load_shard_hours": 0.003,
        "reschedule_hours": 0.0,
    }
    all_rows, most_used = (first.strategies[n].expected.overhead.save_hours for n in (2, 4))
    # An eighth of the 99 GB of large tables and 1 GB of others, eight times as often.
    assert most_used == pytest.approx(8 * all_rows * (0.125 * 99 + 1) / 100, rel=0.01)
    assert observed(schedule, replace(MEASURED, save_hours=0.0124)).plan is first
    again = observed(schedule, replace(MEASURED, save_hours=0.0126)).plan
    assert again is not first
    assert again.costs.save_hours == 0.0126


def test_it_says_what_it_decided_once(caplog):
    schedule = TargetPLS(0.02, mtbf_hours=28)
    with caplog.at_level(logging.INFO, "cpr_ext"):
        observed(schedule, START, START, MEASURED, replace(MEASURED, save_hours=0.012), MEASURED)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert messages[0] == (
        "TargetPLS(0.02): a snapshot every 1.12 h, all rows in turn every 8.96 h, expected PLS "
        "0.02 on 8 shards at an MTBF of 28 h"
    )
    assert messages[1] == (
        "TargetPLS(0.02) counts lost shards only. If this process itself dies, it repeats its "
        "training since the newest snapshot, one every 1.12 h; add '| EverySeconds(...)' to bound "
        "that"
    )
    own = schedule.plan.strategies[4].overhead_fraction
    full = schedule.plan.strategies[0].overhead_fraction
    assert messages[2] == messages[0] + (
        f"; overhead about {100 * own:.2g} %, full recovery {100 * full:.2g} %"
    )


def test_it_warns_when_keeping_to_the_target_costs_more_than_full_recovery(caplog):
    schedule = TargetPLS(1e-5, mtbf_hours=28)
    with caplog.at_level(logging.WARNING, "cpr_ext"):
        observed(schedule, START)
        assert not caplog.records
        observed(schedule, MEASURED, replace(MEASURED, save_hours=0.02))
        observed(schedule, replace(MEASURED, fraction=0.5), MEASURED)
    [warning] = caplog.records
    assert "Recover fully" in warning.getMessage()
    # It keeps to the target all the same.
    assert schedule.interval_hours == pytest.approx(0.125 * 2e-5 * 8 * 28)


def test_as_part_of_a_combination_it_sees_the_run_too():
    schedule = TargetPLS(0.02, mtbf_hours=28)
    both = schedule | EverySteps(100)
    both.observe(START)
    assert both.is_due(Progress(1, 1.13 * 3600))
    assert both.is_due(Progress(100, 0))
    assert not both.is_due(Progress(99, 3600))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"target_pls": 0}, "target_pls is 0.0; it is a share"),
        ({"target_pls": 1.2}, "target_pls is 1.2"),
        ({"mtbf_hours": -3}, "mtbf_hours is -3.0; it must be above 0"),
        ({"mtbf_hours": 0}, "mtbf_hours is 0"),
        ({"total_hours": 0}, "total_hours is 0"),
        ({"total_samples": -5}, "total_samples is -5"),
        ({"total_samples": 5, "total_hours": 5}, "both set the job's length"),
        ({"shards_per_failure": 0}, "shards_per_failure is 0"),
        ({"reschedule_hours": -1}, "reschedule_hours is -1"),
        ({"num_shards": 0}, "num_shards is 0"),
    ],
)
def test_what_cannot_be_is_refused_with_its_value(options, why):
    with pytest.raises(UsageError, match=why):
        TargetPLS(**{"target_pls": 0.02, "mtbf_hours": 28, **options})


PARITY = ParityCosts(4, steady_share=0.02, rebuild_hours=0.01)


def test_with_parity_snapshots_are_as_rare_as_double_losses_allow(caplog):
    """0.01 h unprotected, 3 of 8 peers: a second loss each 28 * 28 / 0.01 / 3 * 8 h."""
    schedule = TargetPLS(0.002, mtbf_hours=28, total_hours=56_000, parity=PARITY)
    without = observed(TargetPLS(0.002, mtbf_hours=28, total_hours=56_000), MEASURED)
    # Until saving was measured, as without parity.
    assert observed(schedule, START).interval_hours == without.interval_hours
    with caplog.at_level(logging.INFO, "cpr_ext"):
        observed(schedule, MEASURED)
    between = 28 * 28 / 0.01 * 8 / 3
    assert 8 * schedule.interval_hours == pytest.approx(math.sqrt(2 * 0.01 * between), rel=1e-3)
    assert schedule.interval_hours > 50 * without.interval_hours
    [record] = caplog.records
    assert "parity 3 + 1 does not suffice with a chance of 23 %" in record.getMessage()


@given(st.floats(1e-5, 1), st.floats(0.5, 500), st.floats(0, 0.05), st.sampled_from([2, 4, 8]))
def test_parity_never_makes_it_save_more_often_and_the_target_is_kept(target, mtbf, share, size):
    parity = replace(PARITY, group_size=size, rebuild_hours=share * mtbf)
    plain = observed(TargetPLS(target, mtbf_hours=mtbf), MEASURED)
    schedule = observed(TargetPLS(target, mtbf_hours=mtbf, parity=parity), MEASURED)
    assert schedule.interval_hours >= plain.interval_hours * (1 - 1e-9)
    job = JobSize(100 * mtbf, 8)
    costs = JobCosts(0.01, 0.02, 0.003, 0.0)
    expected = expected_parity(costs, job, parity, mtbf, 8 * schedule.interval_hours)
    assert expected.pls <= 1.01 * target


def test_a_worker_that_holds_one_of_many_shards_plans_for_all_of_them(caplog):
    """As one checkpointer that holds them all: the interval follows from the job's shards."""
    whole, worker = (TargetPLS(0.1, mtbf_hours=10), TargetPLS(0.1, mtbf_hours=10, num_shards=8))
    observed(whole, RunCosts(num_shards=8, fraction=0.125))
    with caplog.at_level(logging.INFO, "cpr_ext"):
        observed(worker, RunCosts(num_shards=1, fraction=0.125))
    assert len(caplog.records) == 1  # its death is what is planned for
    assert worker.interval_hours == whole.interval_hours
    with pytest.raises(UsageError, match="at most all 8 shards"):
        observed(TargetPLS(0.02, mtbf_hours=28, shards_per_failure=9), START)
