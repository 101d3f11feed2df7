"""Overhead, PLS and parity by the formulas: by hand, the paper's figures, and against histories."""

import itertools
import math
from collections import Counter
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
    ParityCosts,
    Planner,
    RunningPLS,
    expected_pls,
    full_recovery,
    interval_for_pls,
    partial_recovery,
    portion_of_lost_samples,
)
from cpr_ext.wings.policy.expectation import best_full_interval_hours, expected_full_recovery
from cpr_ext.wings.policy.parity import chance_together, expected_parity, second_loss
from cpr_ext.wings.policy.presets import find_preset

JOB = JobSize(100, 10)
COSTS = JobCosts(save_hours=0.5, load_hours=0.3, load_shard_hours=0.1, reschedule_hours=0.2)

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


@given(costs, st.floats(1, 500), st.floats(0.5, 200))
def test_no_number_of_saves_is_better_than_the_best(costs, total, mtbf):
    job = JobSize(total, 8)

    def cost(interval):
        return expected_full_recovery(costs, job, mtbf, interval).overhead.total_hours

    best = best_full_interval_hours(costs, job, mtbf)
    assert best <= total
    saves = round(total / best)
    for number in {1, max(1, saves - 1), saves, saves + 1, 2 * saves}:
        assert cost(best) <= cost(total / number) * (1 + 1e-9)


def test_the_running_account_adds_up_failures_of_several_shards():
    account = RunningPLS(total_samples=1000, num_shards=4)
    assert account.value == 0
    assert account.record_failure([100, 100]) == pytest.approx(0.05)
    assert account.record_failure([300]) == pytest.approx(0.125)
    for impossible in ([1] * 5, [-1]):
        with pytest.raises(UsageError, match="at most 4 numbers"):
            account.record_failure(impossible)
    assert account.samples_lost == 500


def test_the_interval_for_a_target_by_hand():
    # The abstract's inputs: 2 * 0.1 * 8 * 28 = 44.8 h.
    assert interval_for_pls(JobSize(56, 8), 28, 0.1) == pytest.approx(44.8)
    # 2 of 10 shards lost every 25 h, saved every 20 h: 4 failures * 2 shards * 10 / (100 * 10).
    job = JobSize(total_hours=100, num_shards=10, shards_per_failure=2)
    assert interval_for_pls(job, 25, 0.08) == pytest.approx(20)
    assert expected_pls(job, 25, 20) == pytest.approx(0.08)
    assert interval_for_pls(job, 25, 0.9) == 100  # never longer than the job


# --- parity ---


def test_parity_by_hand():
    costs = JobCosts(0.1, load_hours=0.3, load_shard_hours=0.2, reschedule_hours=0.05)
    parity = ParityCosts(4, steady_share=0.03, rebuild_hours=0.1, rebuild_stall=0.5)
    found = expected_parity(costs, JobSize(100, 8), parity, 10, 50)
    assert found.overhead.load_hours == pytest.approx(10 * 0.05 + 0.2 * found.fallbacks)
    # Two of eight at once: of one group of four with a chance of 3/7.
    loss = second_loss(JobSize(1, 8, 2), 10, 4, 5.0)
    assert loss.chance == pytest.approx(3 / 7 + 4 / 7 * loss.meanwhile)


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


# --- refusals ---

PARITY = ParityCosts(4, steady_share=0.03, rebuild_hours=0.1)
REFUSED = {
    **{
        f"{field} is {bad}": lambda field=field, bad=bad: replace(COSTS, **{field: bad})
        for field in vars(COSTS)
        for bad in (-1.0, math.nan, math.inf)
    },
    "save_hours is 0; it must be above 0": lambda: replace(COSTS, save_hours=0),
    "total_hours is -1": lambda: JobSize(-1, 8),
    "num_shards is 0": lambda: JobSize(1, 0),
    "shards_per_failure is 9.* at most all 8 shards": lambda: JobSize(1, 8, 9),
    "mtbf_hours is 0": lambda: full_recovery(COSTS, JOB, 0, 1),
    "interval_hours is -1": lambda: partial_recovery(COSTS, JOB, 1, -1),
    "lost_computation_hours is -1": lambda: Overhead(1, 1, -1, 1),
    "-1.*10.*2": lambda: portion_of_lost_samples(-1, 10, 2),
    "0.*0.*2": lambda: portion_of_lost_samples(0, 0, 2),
    "0.*10.*0": lambda: portion_of_lost_samples(0, 10, 0),
    **{
        f"target_pls is {bad}; it is a share": lambda bad=bad: interval_for_pls(JOB, 25, bad)
        for bad in (0, -0.1, 1.5, math.nan)
    },
    "target_pls is 1.01": lambda: Planner(JOB, COSTS, 28).plan(1.01),
    "no preset 'x'; there are abstract-56h, production-50h": lambda: find_preset("x"),
    "group_size is 1": lambda: replace(PARITY, group_size=1),
    "steady_share is -0.1": lambda: replace(PARITY, steady_share=-0.1),
    "rebuild_hours is nan": lambda: replace(PARITY, rebuild_hours=math.nan),
    "rebuild_stall is 1.5": lambda: replace(PARITY, rebuild_stall=1.5),
    r"possible here: \[2, 3, 6\]": lambda: PARITY.require_fit(6),
    "does not fit 9 shards": lambda: expected_parity(COSTS, JobSize(10, 9), PARITY, 10, 5),
    "fit 9 shards": lambda: Planner(JobSize(10, 9), COSTS, 28, parity=PARITY).plan(0.1),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused_with_name_and_value(words):
    with pytest.raises(UsageError, match=words):
        REFUSED[words]()
