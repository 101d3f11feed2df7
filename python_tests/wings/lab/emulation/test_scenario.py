from dataclasses import replace

import pytest

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.emulation.run_strategy import EmulatedClock, Training
from cpr_ext.wings.lab.emulation.scenario import STRATEGIES, find_scenario
from cpr_ext.wings.policy import ParityCosts


def test_intervals_of_the_abstract_follow_from_its_formulas():
    scenario = find_scenario("abstract-56h")
    assert scenario.strategy("full").interval_hours == pytest.approx((2 * 5.3 / 60 * 28) ** 0.5)
    assert scenario.strategy("partial").interval_hours == scenario.strategy("full").interval_hours
    assert scenario.strategy("cpr-mfu").interval_hours == pytest.approx(44.8)
    tight = replace(scenario, pls_target=0.01)
    assert tight.strategy("cpr-ssu").save_every_hours == pytest.approx(0.56)
    loose = replace(scenario, pls_target=1.0)
    assert loose.strategy("cpr-vanilla").interval_hours == 56


def test_every_strategy_recovers_by_its_rules():
    parity = ParityCosts(4, steady_share=0.03, rebuild_hours=0.1)
    scenario = replace(find_scenario("abstract-56h"), parity=parity)
    rules = {name: scenario.strategy(name).recovery for name in STRATEGIES}
    assert rules.pop("no-failure") == "none"
    assert rules.pop("full") == "full"
    assert rules.pop("parity") == "exact"
    assert set(rules.values()) == {"partial"}


def test_a_scenario_out_of_range_is_refused_by_name():
    for wrong in ({"pls_target": 0}, {"pls_target": 1.5}, {"fraction": 0}, {"num_failures": -1}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            replace(find_scenario("abstract-56h"), **wrong)
    with pytest.raises(UsageError, match="give --parity-group-size"):
        find_scenario("abstract-56h").strategy("parity")


def test_a_stream_needs_a_number_of_steps():
    class Stream:
        name, num_train_samples = "stream", None
        recommended = Training().open(0).recommended

    with pytest.raises(UsageError, match="--steps"):
        Training().clock(Stream(), 10)
    assert Training(max_steps=5).clock(Stream(), 10).total_steps == 5


# --- the clock ---


def test_a_job_of_56_hours_in_1000_steps():
    clock = EmulatedClock(56, total_samples=128_000, samples_per_step=128)
    assert clock.total_steps == 1000
    assert clock.hours(64_000) == 28
    assert clock.hours_per_step == pytest.approx(0.056)
    assert clock.step_at(28) == 500
    assert clock.step_at(28.02) == 500
    assert clock.step_at(28.03) == 501
    assert clock.interval_steps(44.8) == 800
    assert clock.interval_steps(0.125 * 44.8) == 100


def test_what_a_run_cannot_show_is_refused_with_the_remedy():
    clock = EmulatedClock(50, total_samples=1000, samples_per_step=100)
    with pytest.raises(UsageError, match=r"one training step stands for 5 h.*more steps"):
        clock.interval_steps(2)
    with pytest.raises(UsageError, match="must be positive"):
        clock.interval_steps(0)
    with pytest.raises(UsageError, match="not within the job"):
        clock.step_at(50.1)
    for bad in ((0, 10, 1), (float("nan"), 10, 1), (5, 0, 1), (5, 10, 0)):
        with pytest.raises(UsageError):
            EmulatedClock(*bad)
