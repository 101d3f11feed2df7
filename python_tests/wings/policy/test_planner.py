"""The plan: presets, fractions, the choice between strategies, what it says, what it keeps."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext.wings.policy import JobCosts, JobSize, ParityCosts, Planner

COSTS = JobCosts(0.1, 0.1, 0.05, 0.05)
PARITY = ParityCosts(4, steady_share=0.02, rebuild_hours=0.02)


@settings(deadline=None)
@given(
    st.floats(1, 500),
    st.integers(1, 32),
    st.floats(1, 200),
    st.floats(0.001, 1),
    st.floats(0.01, 1),
)
def test_a_plan_keeps_to_its_target_and_takes_the_cheaper(total, shards, mtbf, target, fraction):
    plan = Planner(JobSize(total, shards), COSTS, mtbf, fraction=fraction).plan(target)
    full, _, vanilla, *prioritized = plan.strategies
    for strategy in (vanilla, *prioritized):
        assert strategy.expected.pls <= target * (1 + 1e-9)
        assert strategy.interval_hours <= total
    cheaper = min(full, vanilla, prioritized[1], key=lambda strategy: strategy.overhead_fraction)
    assert plan.recommended.recovery == cheaper.recovery
    assert plan.recommended.overhead_fraction <= full.overhead_fraction
    for strategy in prioritized:
        assert strategy.interval_hours == pytest.approx(vanilla.interval_hours)
        saves = strategy.interval_hours / strategy.save_every_hours
        assert saves == pytest.approx(math.ceil(1 / fraction - 1e-9))


def plan(target, *, parity=PARITY, costs=COSTS, shards=8, mtbf=28.0, hours=56.0, **options):
    return Planner(JobSize(hours, shards), costs, mtbf, parity=parity, **options).plan(target)


def test_parity_before_cpr_where_two_losses_are_likely():
    made = plan(0.004, shards=1024, mtbf=1.0, hours=720, parity=replace(PARITY, group_size=8))
    assert made.recommended.fallback_chance > 0.01
    assert made.recommended.name == "parity + CPR"
    assert made.reason.startswith("Keep parity in peers' memory, and keep CPR's snapshots every")


@settings(deadline=None, max_examples=60)
@given(
    st.floats(1e-5, 1),
    st.floats(0, 0.2),
    st.floats(0, 1),
    st.sampled_from([2, 4, 8]),
    st.floats(1, 200),
)
def test_the_recommended_strategy_costs_least_and_keeps_to_the_target(
    target, steady, rebuild, size, mtbf
):
    parity = ParityCosts(size, steady, rebuild)
    made = plan(target, parity=parity, mtbf=mtbf)
    without = plan(target, parity=None, mtbf=mtbf)
    assert made.strategies[:6] == without.strategies
    alone, before_cpr = made.strategies[6:]
    assert (alone.name, before_cpr.name) == ("parity", "parity + CPR")
    assert made.recommended.overhead_fraction <= without.recommended.overhead_fraction
    for one in (alone, before_cpr):
        assert one.overhead_fraction >= steady
        assert one.interval_hours <= made.job.total_hours
    assert alone.expected.pls <= target * (1 + 1e-6)


# --- priorities of any fraction, against histories played event by event and row by row ---

JOB = JobSize(560, 8)
SAVING = JobCosts(save_hours=0.09, load_hours=0.05, load_shard_hours=0.05, reschedule_hours=0.06)
MTBF_HOURS = 28.0
NUM_ROWS = 300


def play(random, strategy):
    """One history: hours of overhead; PLS since all rows had their turn; PLS row by row."""
    saved_at = np.zeros(NUM_ROWS)
    has_had_turn = np.zeros(NUM_ROWS, dtype=bool)
    turn_began = overhead = lost = lost_by_row = 0.0
    budget, next_row = math.ceil(strategy.fraction * NUM_ROWS), 0
    saves, failure = 0, random.exponential(MTBF_HOURS)
    while True:
        save = (saves + 1) * strategy.save_every_hours
        while failure < min(save, JOB.total_hours):
            lost += failure - turn_began
            lost_by_row += failure - saved_at.mean()
            overhead += SAVING.load_shard_hours + SAVING.reschedule_hours
            failure += random.exponential(MTBF_HOURS)
        if save > JOB.total_hours * (1 + 1e-9):
            break
        rows = (next_row + np.arange(budget)) % NUM_ROWS
        next_row = (next_row + budget) % NUM_ROWS
        saved_at[rows], has_had_turn[rows] = save, True
        if has_had_turn.all():
            turn_began = save
            has_had_turn[:] = False
        overhead += strategy.fraction * SAVING.save_hours
        saves += 1
    samples = JOB.total_hours * JOB.num_shards
    return overhead, lost / samples, lost_by_row / samples


@pytest.mark.parametrize("fraction", [0.125, 0.3, 0.34, 0.5, 0.51, 0.9, 1.0])
def test_what_a_plan_expects_of_a_fraction_is_what_histories_come_to(fraction):
    plan = Planner(JOB, SAVING, MTBF_HOURS, fraction=fraction).plan(0.02)
    strategy = next(each for each in plan.strategies if each.priority == "mfu")
    random = np.random.default_rng(5)
    played = np.array([play(random, strategy) for _ in range(150)])
    mean, error = played.mean(axis=0), played.std(axis=0, ddof=1) / math.sqrt(len(played))
    assert abs(mean[0] - strategy.expected.overhead.total_hours) < 4 * error[0]
    assert abs(mean[1] - strategy.expected.pls) < 4 * error[1]
    assert mean[2] < strategy.expected.pls + 4 * error[2]  # no row is worse off than its turn says


def test_where_a_priority_costs_more_than_full_recovery_the_reason_says_how_much():
    cost_share = (0.125 + 1) / 2  # half of the bytes are saved whole each time
    plan = Planner(JOB, SAVING, MTBF_HOURS, fraction=0.125, cost_share=cost_share).plan(0.006)
    full, _, vanilla, _, most_used, _ = plan.strategies
    assert vanilla.overhead_fraction < full.overhead_fraction < most_used.overhead_fraction
    assert plan.reason.startswith("Recover partially and save all rows every 2.69 h: ")
    assert plan.reason.endswith(
        " Saving the 12.5 % most used rows more often would cost "
        f"{100 * most_used.overhead_fraction:.3g} %."
    )
