"""The simulation against a plain loop and figures by hand; the formulas against the simulation."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy import (
    EmpiricalFailures,
    ExponentialFailures,
    JobCosts,
    JobSize,
    SavePattern,
    full_recovery,
    partial_recovery,
)
from cpr_ext.wings.policy.expectation import (
    best_full_interval_hours,
    expected_full_recovery,
    expected_partial_recovery,
)
from cpr_ext.wings.policy.simulation import simulate_full_recovery, simulate_partial_recovery

COSTS = JobCosts(save_hours=0.5, load_hours=0.3, load_shard_hours=0.1, reschedule_hours=0.2)
EVERY_TEN = EmpiricalFailures((10.0,))
FEW = {"histories": 2}


def test_full_recovery_by_hand():
    job = JobSize(35, 4)
    # Failures at 10, 20, 30 h, saves at 4, 8, ... 32: lost 2 + 0 + 2.
    played = simulate_full_recovery(COSTS, job, EVERY_TEN, 4, **FEW)
    assert played.failures == 3
    assert vars(played.overhead) == pytest.approx(
        {
            "save_hours": 4,
            "load_hours": 0.9,
            "lost_computation_hours": 4,
            "reschedule_hours": 0.6,
            "parity_hours": 0,
        }
    )
    # 10 h hold two cycles of 4 + 0.5 h and lose 1 h: back to 8, 16, 24, 32; the last 3 h go well.
    running = simulate_full_recovery(COSTS, job, EVERY_TEN, 4, clock="running", **FEW)
    assert running.failures == 4
    assert running.overhead.lost_computation_hours == pytest.approx(4)
    assert running.overhead.save_hours == pytest.approx(4)


def test_partial_recovery_by_hand():
    job = JobSize(35, 4, shards_per_failure=2)
    played = simulate_partial_recovery(COSTS, job, EVERY_TEN, 4, **FEW)
    assert played.overhead.lost_computation_hours == 0
    assert played.overhead.load_hours == pytest.approx(0.3)
    assert played.pls == pytest.approx((2 + 0 + 2) * 2 / (35 * 4))
    # After 10, 20, 30 of 39 running hours, in cycles of 4.5: 1, 2 and 3 h since the save.
    running = simulate_partial_recovery(COSTS, job, EVERY_TEN, 4, clock="running", **FEW)
    assert running.pls == pytest.approx((1 + 2 + 3) * 2 / (35 * 4))


def plain_play(costs, job, every, interval, pattern, clock, *, full):
    """One history, event after event: (failures, saves, hours lost or since all were saved)."""
    step = interval / pattern.saves_per_turn
    save = pattern.cost_share * costs.save_hours if clock == "running" else 0
    failures = saves = 0
    trained = saved = turn_began = hours = 0.0
    until_failure = every
    while True:
        piece = min(step * (saves + 1), job.total_hours) - trained
        if until_failure < piece:  # struck while training
            trained += until_failure
            until_failure = every
            failures += 1
            hours += trained - (saved if full else turn_began)
            if full and clock == "running":
                trained = saved
            continue
        trained += piece
        until_failure -= piece
        if step * (saves + 1) > job.total_hours * (1 + 1e-12):
            return failures, saves, hours
        left = save
        while until_failure < left:  # struck while saving
            failures += 1
            if full:
                hours += trained - saved + until_failure
                break
            hours += trained - turn_began
            left -= until_failure
            until_failure = every
        if until_failure < left:
            trained, until_failure = saved, every
            continue
        until_failure -= left
        saves += 1
        saved = trained
        if saves % pattern.saves_per_turn == 0:
            turn_began = trained


@given(
    total=st.floats(5, 200),
    every=st.floats(3, 100),
    interval=st.floats(1, 60),
    fraction=st.sampled_from([1.0, 0.5, 0.3, 0.125]),
    clock=st.sampled_from(["training", "running"]),
    full=st.booleans(),
)
def test_it_plays_as_a_plain_loop_does(total, every, interval, fraction, clock, full):
    every *= math.pi / 3  # no failure at the very moment of a save
    pattern = SavePattern(1, 1) if full else SavePattern(fraction, fraction)
    job = JobSize(total, 5)
    if full and clock == "running":
        assume(interval + 0.6 < every)  # else it never ends
    failures, saves, hours = plain_play(COSTS, job, every, interval, pattern, clock, full=full)
    model = EmpiricalFailures((every,))
    if full:
        played = simulate_full_recovery(COSTS, job, model, interval, clock=clock, **FEW)
        assert played.overhead.lost_computation_hours == pytest.approx(hours, abs=1e-6)
        assert played.overhead.save_hours == pytest.approx(saves * 0.5)
    else:
        played = simulate_partial_recovery(
            COSTS, job, model, interval, pattern=pattern, clock=clock, **FEW
        )
        assert played.pls == pytest.approx(hours / (total * 5), abs=1e-7)
        assert played.overhead.save_hours == pytest.approx(saves * 0.5 * fraction)
    assert played.failures == failures


GRID = [(500, 20, 0.5), (500, 20, 2), (1000, 10, 0.5), (2000, 100, 5), (2000, 100, 10)]


@pytest.mark.parametrize(("total", "mtbf", "interval"), GRID)
def test_the_papers_formulas_are_within_two_percent_of_2000_histories(total, mtbf, interval):
    job, model = JobSize(total, 8, 2), ExponentialFailures(mtbf)
    costs = JobCosts(0.1, 0.2, 0.1, 0.1)
    full = simulate_full_recovery(costs, job, model, interval)
    assert full_recovery(costs, job, mtbf, interval).total_hours == pytest.approx(
        full.overhead.total_hours, rel=0.02
    )
    partial = simulate_partial_recovery(costs, job, model, interval)
    assert partial_recovery(costs, job, mtbf, interval).total_hours == pytest.approx(
        partial.overhead.total_hours, rel=0.02
    )


@pytest.mark.parametrize("clock", ["training", "running"])
@pytest.mark.parametrize("fraction", [1.0, 0.3, 0.125])
@pytest.mark.parametrize(
    ("total", "mtbf", "interval"), [*GRID, (56, 28, 44.8), (50, 10, 9), (100, 28, 150), (10, 5, 7)]
)
def test_expectations_hold_where_the_papers_assumptions_do_not(
    total, mtbf, interval, fraction, clock
):
    job, model = JobSize(total, 8, 2), ExponentialFailures(mtbf)
    pattern = SavePattern(fraction, min(1, 1.1 * fraction))
    expected = expected_partial_recovery(COSTS, job, mtbf, interval, pattern=pattern, clock=clock)
    played = simulate_partial_recovery(
        COSTS, job, model, interval, pattern=pattern, clock=clock, histories=8000, seed=1
    )
    assert_agree(expected, played)
    if fraction == 1 and interval < 2 * mtbf:
        expected = expected_full_recovery(COSTS, job, mtbf, interval, clock=clock)
        played = simulate_full_recovery(
            COSTS, job, model, interval, clock=clock, histories=8000, seed=1
        )
        assert_agree(expected, played)


def assert_agree(expected, played):
    hours = played.overhead.total_hours
    assert abs(expected.overhead.total_hours - hours) < 4 * played.total_standard_error_hours
    assert abs(expected.pls - played.pls) <= 4 * played.pls_standard_error
    for part, value in vars(played.overhead).items():
        assert getattr(expected.overhead, part) == pytest.approx(value, rel=0.08, abs=1e-9)


costs = st.builds(JobCosts, st.floats(0.01, 2), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))


@given(
    costs, st.floats(1, 500), st.floats(0.5, 200), st.integers(1, 60),
    st.sampled_from(["training", "running"]),
)  # fmt: skip
def test_no_number_of_saves_is_better_than_the_best(costs, total, mtbf, saves, clock):
    job = JobSize(total, 8)
    assume(total / mtbf < 200)

    def cost(interval):
        try:
            expected = expected_full_recovery(costs, job, mtbf, interval, clock=clock)
        except UsageError:
            return math.inf
        return expected.overhead.total_hours

    best = best_full_interval_hours(costs, job, mtbf, clock=clock)
    assert best <= total
    assert cost(best) <= cost(total / saves) * (1 + 1e-9)


def test_what_cannot_be_played_is_refused():
    job = JobSize(100, 8)
    with pytest.raises(UsageError, match="histories is 1"):
        simulate_partial_recovery(COSTS, job, EVERY_TEN, 4, histories=1)
    with pytest.raises(UsageError, match="histories is 1"):
        simulate_full_recovery(COSTS, job, EVERY_TEN, 4, histories=1)
    with pytest.raises(UsageError, match="too many to play"):
        simulate_partial_recovery(COSTS, job, ExponentialFailures(1e-4), 4)
    with pytest.raises(UsageError, match="would not end"):
        simulate_full_recovery(COSTS, job, ExponentialFailures(1), 90, clock="running")
    with pytest.raises(UsageError, match="clock is 'wall'"):
        simulate_full_recovery(COSTS, job, EVERY_TEN, 4, clock="wall")
