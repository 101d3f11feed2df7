"""The portion of lost samples, against a plain simulation of shards that count samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy import (
    JobSize,
    RunningPLS,
    exact_expected_pls,
    expected_pls,
    interval_for_pls,
    portion_of_lost_samples,
)


@given(
    events=st.lists(
        st.tuples(st.integers(1, 50), st.sampled_from(["save", "fail"]), st.integers(0, 3)),
        max_size=30,
    )
)
def test_it_is_the_share_of_all_shard_samples_whose_effect_failures_took(events):
    num_shards, trained = 4, 0
    held = [0] * num_shards  # samples in each shard that are not saved yet
    lost = lost_by_formula = 0
    saved_at = [0] * num_shards
    for samples, event, shard in events:
        trained += samples
        held = [count + samples for count in held]
        if event == "save":
            held, saved_at = [0] * num_shards, [trained] * num_shards
        else:
            lost += held[shard]
            held[shard] = 0
            lost_by_formula += trained - saved_at[shard]
            saved_at[shard] = trained
    assert lost == lost_by_formula
    total = max(trained, 1)
    assert portion_of_lost_samples(lost, total, num_shards) == lost / (total * num_shards)
    assert 0 <= portion_of_lost_samples(lost, total, num_shards) <= 1


@pytest.mark.parametrize("given", [(-1, 10, 2), (0, 0, 2), (0, 10, 0)])
def test_what_cannot_be_is_refused_with_its_values(given):
    with pytest.raises(UsageError) as refusal:
        portion_of_lost_samples(*given)
    assert all(str(value) in str(refusal.value) for value in given)


def test_the_running_account_adds_up_failures_of_several_shards():
    account = RunningPLS(total_samples=1000, num_shards=4)
    assert account.value == 0
    assert account.record_failure([100, 100]) == pytest.approx(0.05)
    assert account.record_failure([300]) == pytest.approx(0.125)
    for impossible in ([1] * 5, [-1]):
        with pytest.raises(UsageError, match="at most 4 numbers"):
            account.record_failure(impossible)
    assert account.samples_lost == 500


# By hand: a job of 100 h, 10 shards, 2 of them lost every 25 h, saved every 20 h.
# A failure finds a shard 10 h after its save on average: 4 failures * 2 shards * 10 / (100 * 10).
JOB = JobSize(total_hours=100, num_shards=10, shards_per_failure=2)


def test_the_interval_for_a_target_by_hand():
    # The abstract's inputs: 2 * 0.1 * 8 * 28 = 44.8 h.
    assert interval_for_pls(JobSize(56, 8), 28, 0.1) == pytest.approx(44.8)
    assert interval_for_pls(JOB, 25, 0.08) == pytest.approx(20)
    assert interval_for_pls(JOB, 25, 0.9) == 100  # never longer than the job


jobs = st.builds(
    lambda total, shards, lost: JobSize(total, shards, min(shards, lost)),
    st.floats(1, 1e4),
    st.integers(1, 64),
    st.integers(1, 8),
)


@given(jobs, st.floats(0.1, 1e4), st.floats(1e-3, 1))
def test_the_interval_for_a_target_keeps_to_it(job, mtbf, target):
    interval = interval_for_pls(job, mtbf, target)
    assert 0 < interval <= job.total_hours
    assert expected_pls(job, mtbf, interval) <= target * (1 + 1e-12)


@pytest.mark.parametrize("target", [0, -0.1, 1.5, float("nan")])
def test_a_target_that_is_no_share_is_refused(target):
    with pytest.raises(UsageError, match=f"target_pls is {target}; it is a share"):
        interval_for_pls(JOB, 25, target)


@pytest.mark.parametrize("interval", [20, 70, 1000])
def test_the_expectation_is_that_of_drawn_histories(interval):
    """Shards fail on their own, every 25 h * 10 shards / 2 lost each time."""
    rng, histories = np.random.default_rng(0), 4000
    lost = 0.0
    for _ in range(histories):
        times = np.sort(rng.uniform(0, 100, rng.poisson(100 / 125)))
        since_save = times - np.floor(times / interval) * interval
        lost += since_save.sum() / 100
    assert lost / histories == pytest.approx(exact_expected_pls(JOB, 25, interval), rel=0.06)
