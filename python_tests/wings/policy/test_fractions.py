"""Priorities of any fraction against histories played event by event, row by row, on their own."""

import math

import numpy as np
import pytest

from cpr_ext.wings.policy import JobCosts, JobSize, Planner, StateBytes

JOB = JobSize(560, 8)
COSTS = JobCosts(save_hours=0.09, load_hours=0.05, load_shard_hours=0.05, reschedule_hours=0.06)
MTBF_HOURS = 28.0
NUM_ROWS = 300
FRACTIONS = (0.125, 0.3, 0.34, 0.4, 0.5, 0.51, 0.6, 0.9, 1.0)


def planner(fraction, **options):
    return Planner(JOB, COSTS, MTBF_HOURS, fraction=fraction, **options)


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
            overhead += COSTS.load_shard_hours + COSTS.reschedule_hours
            failure += random.exponential(MTBF_HOURS)
        if save > JOB.total_hours * (1 + 1e-9):
            break
        rows = (next_row + np.arange(budget)) % NUM_ROWS
        next_row = (next_row + budget) % NUM_ROWS
        saved_at[rows], has_had_turn[rows] = save, True
        if has_had_turn.all():
            turn_began = save
            has_had_turn[:] = False
        overhead += strategy.fraction * COSTS.save_hours
        saves += 1
    samples = JOB.total_hours * JOB.num_shards
    return overhead, lost / samples, lost_by_row / samples


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_what_a_plan_expects_of_a_fraction_is_what_histories_come_to(fraction):
    plan = planner(fraction).plan(0.02)
    strategy = next(each for each in plan.strategies if each.priority == "mfu")
    random = np.random.default_rng(5)
    played = np.array([play(random, strategy) for _ in range(150)])
    mean, error = played.mean(axis=0), played.std(axis=0, ddof=1) / math.sqrt(len(played))
    assert abs(mean[0] - strategy.expected.overhead.total_hours) < 4 * error[0]
    assert abs(mean[1] - strategy.expected.pls) < 4 * error[1]
    assert mean[2] < strategy.expected.pls + 4 * error[2]  # no row is worse off than its turn says


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_the_target_holds_for_every_strategy_whatever_the_fraction(fraction):
    for target in (0.005, 0.02, 0.1):
        plan = planner(fraction).plan(target)
        for strategy in plan.strategies[2:]:
            assert strategy.expected.pls <= target * 1.001, strategy.name


def test_where_a_priority_costs_more_than_full_recovery_the_reason_says_how_much():
    plan = planner(0.125, state_bytes=StateBytes(1e9, 1e9)).plan(0.006)
    full, _, vanilla, _, most_used, _ = plan.strategies
    assert vanilla.overhead_fraction < full.overhead_fraction < most_used.overhead_fraction
    assert plan.reason.startswith("Recover partially and save all rows every 2.69 h: ")
    assert plan.reason.endswith(
        " Saving the 12.5 % most used rows more often would cost "
        f"{100 * most_used.overhead_fraction:.3g} %."
    )
