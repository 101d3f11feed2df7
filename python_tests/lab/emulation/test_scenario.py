from dataclasses import replace

import numpy as np
import pytest

from cpr_ext import Precision
from cpr_ext.errors import UsageError
from cpr_ext.lab.emulation.clock import EmulatedClock
from cpr_ext.lab.emulation.presets import PRESET_NAMES, find_scenario
from cpr_ext.lab.emulation.run_strategy import Training, plan_failures
from cpr_ext.lab.emulation.scenario import DrawnFailure
from cpr_ext.lab.emulation.strategies import STRATEGIES, EmulatedRounding
from cpr_ext.policy import ExponentialFailures, GammaFailures, ParityCosts, Planner


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_failures_depend_on_the_seed_only_and_lie_within_the_job(name: str) -> None:
    scenario = find_scenario(name)
    assert scenario.draw_failures(3) == scenario.draw_failures(3)
    assert len({str(scenario.draw_failures(seed)) for seed in range(10)}) > 5
    dearer = replace(scenario, costs=replace(scenario.costs, save_hours=1.0), pls_target=0.5)
    assert dearer.draw_failures(6) == scenario.draw_failures(6) != []
    for failure in scenario.draw_failures(5):
        assert 0 <= failure.hour <= scenario.job.total_hours
        assert len(set(failure.shards)) == scenario.job.shards_per_failure
        assert set(failure.shards) <= set(range(scenario.job.num_shards))


def test_drawn_failures_come_as_often_as_the_model_says() -> None:
    scenario = find_scenario("abstract-56h")
    scenario = replace(scenario, failure_model=GammaFailures(2.0, 14.0))
    counts = [len(scenario.draw_failures(seed)) for seed in range(400)]
    # A renewal process started fresh: 56/28 less a quarter, for a squared variation of 1/2.
    assert np.mean(counts) == pytest.approx(1.75, abs=4 * np.std(counts) / np.sqrt(400))


def test_the_production_run_has_five_failures_of_four_of_18_shards() -> None:
    scenario = find_scenario("production-50h")
    for seed in range(5):
        failures = scenario.draw_failures(seed)
        assert [len(failure.shards) for failure in failures] == [4] * 5
        assert [f.hour for f in failures] == sorted(f.hour for f in failures)


def test_intervals_of_the_abstract_follow_from_its_formulas() -> None:
    scenario = find_scenario("abstract-56h")
    assert scenario.strategy("full").interval_hours == pytest.approx((2 * 5.3 / 60 * 28) ** 0.5)
    assert scenario.strategy("partial").interval_hours == scenario.strategy("full").interval_hours
    assert scenario.strategy("cpr-vanilla").save_every_hours == pytest.approx(44.8)
    assert scenario.strategy("cpr-mfu").save_every_hours == pytest.approx(5.6)
    assert scenario.strategy("cpr-mfu").interval_hours == pytest.approx(44.8)
    tight = replace(scenario, pls_target=0.01)
    assert tight.strategy("cpr-ssu").save_every_hours == pytest.approx(0.56)
    loose = replace(scenario, pls_target=1.0)
    assert loose.strategy("cpr-vanilla").interval_hours == 56


def test_rounded_rows_are_those_of_a_priority_and_their_bytes_can_be_spent() -> None:
    scenario = find_scenario("abstract-56h")
    smaller = replace(scenario, rounding=EmulatedRounding("int4", 0.25))
    oftener = replace(scenario, rounding=EmulatedRounding("int4", 0.25, spends_bytes=True))
    assert smaller.strategy("cpr-mfu").save_every_hours == pytest.approx(5.6)
    assert oftener.strategy("cpr-mfu").save_every_hours == pytest.approx(1.4)
    assert smaller.strategy("cpr-mfu").precision == Precision(partial="int4")
    for name in ("full", "partial", "cpr-vanilla"):
        assert smaller.strategy(name) == oftener.strategy(name) == scenario.strategy(name)
        assert smaller.strategy(name).precision.is_exact
    with pytest.raises(UsageError, match=r"row_share is 1\.5"):
        EmulatedRounding("int4", 1.5)


def test_every_strategy_recovers_by_its_rules() -> None:
    parity = ParityCosts(4, steady_share=0.03, rebuild_hours=0.1)
    scenario = replace(find_scenario("abstract-56h"), parity=parity)
    rules = {name: scenario.strategy(name).recovery for name in STRATEGIES}
    assert rules.pop("no-failure") == "none"
    assert rules.pop("full") == "full"
    assert rules.pop("parity") == "exact"
    assert set(rules.values()) == {"partial"}


def test_with_parity_saves_are_as_rare_as_its_plan_says() -> None:
    parity = ParityCosts(4, steady_share=0.03, rebuild_hours=0.1)
    scenario = replace(find_scenario("abstract-56h"), parity=parity)
    # 1/6 h unprotected, 3 of 8 peers, a failure every 28 h: a double loss every 12,589 h.
    best = (2 * 5.3 / 60 * 12_589) ** 0.5
    assert scenario.strategy("parity").interval_hours == pytest.approx(best, rel=1e-3)
    tight = replace(scenario, failure_model=ExponentialFailures(0.5), pls_target=0.01)
    planner = Planner(tight.job, tight.costs, tight.failure_model, parity=parity)
    planned = next(one for one in planner.plan(0.01).strategies if one.name == "parity")
    assert tight.strategy("parity").interval_hours == planned.interval_hours < 56


def test_parity_without_a_group_size_is_refused() -> None:
    with pytest.raises(UsageError, match="give --parity-group-size"):
        find_scenario("abstract-56h").strategy("parity")


def test_failures_within_one_step_take_their_shards_together() -> None:
    clock = EmulatedClock(10, total_samples=100, samples_per_step=10)
    drawn = [DrawnFailure(2.1, (0, 3)), DrawnFailure(1.9, (3, 1)), DrawnFailure(9.0, (2,))]
    planned = [(failure.step, failure.shards) for failure in plan_failures(drawn, clock)]
    assert planned == [(2, (0, 1, 3)), (9, (2,))]


@pytest.mark.parametrize(
    "change", [{"pls_target": 0}, {"pls_target": 1.5}, {"fraction": 0}, {"num_failures": -1}]
)
def test_a_scenario_out_of_range_is_refused_by_name(change: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(change))):
        replace(find_scenario("abstract-56h"), **change)


def test_a_stream_needs_a_number_of_steps() -> None:
    class Stream:
        name, num_train_samples = "stream", None
        recommended = Training().open(0).recommended

    with pytest.raises(UsageError, match="--steps"):
        Training().clock(Stream(), 10)
    assert Training(max_steps=5).clock(Stream(), 10).total_steps == 5
