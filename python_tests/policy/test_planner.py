"""The plan: the two presets, the choice between full and partial, what it says, what it keeps."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.policy import (
    EmpiricalFailures,
    ExponentialFailures,
    GammaFailures,
    JobCosts,
    JobSize,
    StateBytes,
)
from cpr_ext.policy.failure_log import times_to_failure
from cpr_ext.policy.fitting import fit_failures
from cpr_ext.policy.planner import Planner
from cpr_ext.policy.presets import PRESETS, find_preset

NAMES = ["full", "partial, full's interval", "CPR-vanilla", "CPR-SCAR", "CPR-MFU", "CPR-SSU"]
COSTS = JobCosts(0.1, 0.1, 0.05, 0.05)


def preset_plan(name, **options):
    preset = find_preset(name)
    planner = Planner(preset.job, preset.costs, preset.failures, **options)
    return planner.plan(preset.target_pls)


def test_the_plan_of_the_abstract():
    plan = preset_plan("abstract-56h")
    assert [strategy.name for strategy in plan.strategies] == NAMES
    full, at_full, vanilla, *prioritized = plan.strategies
    # The paper's: 8.2-8.5 % to 0.53-0.68 %. Derived: 4.3-4.5 %, and the intervals.
    assert 0.082 <= full.overhead_fraction <= 0.085
    assert 2.2 <= full.interval_hours <= 2.3
    assert 0.043 <= at_full.overhead_fraction <= 0.045
    assert vanilla.interval_hours == pytest.approx(44.8)
    for strategy in (vanilla, *prioritized):
        assert 0.0053 <= strategy.formula_overhead_fraction <= 0.0068
        assert 0.0053 <= strategy.overhead_fraction <= 0.0068
        assert strategy.expected.pls <= 0.1
    assert [s.save_every_hours for s in prioritized] == pytest.approx([5.6] * 3)
    assert plan.recommended.name == "CPR-MFU"
    assert plan.reason.startswith("Recover partially and save the 12.5 % most used rows every 5.6")


def test_the_plan_of_the_production_run():
    plan = preset_plan("production-50h")
    full, _, vanilla, *_ = plan.strategies
    # By hand: failures every 10 h, 4 of 18 shards: 2 * 0.1 * 18 * 10 / 4 = 9 h; 5 whole saves.
    assert vanilla.interval_hours == pytest.approx(9)
    assert vanilla.expected.failures == pytest.approx(5)
    assert vanilla.expected.overhead.save_hours == pytest.approx(5 * 5.3 / 60)
    assert vanilla.expected.overhead.reschedule_hours == pytest.approx(5 * 4 / 60)
    assert plan.recommended.overhead_fraction < 0.2 * full.overhead_fraction


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_a_preset_says_where_every_figure_is_from(preset):
    assert any("Ours" in source for source in preset.sources)
    assert any("paper" in source or "Derived" in source for source in preset.sources)


def test_full_recovery_is_taken_where_little_may_be_lost():
    # 2 * 1e-4 * 8 * 28 = 2.7 min between saves of 6 min each: dearer than full recovery.
    plan = Planner(JobSize(56, 8), COSTS, ExponentialFailures(28)).plan(1e-4)
    assert plan.recommended.name == "full"
    assert plan.reason.startswith("Recover fully and save everything every 2.3")
    assert "2.69 min" in plan.reason


@settings(deadline=None)
@given(
    st.floats(1, 500),
    st.integers(1, 32),
    st.floats(1, 200),
    st.floats(0.001, 1),
    st.floats(0.01, 1),
    st.sampled_from(["training", "running"]),
)
def test_a_plan_keeps_to_its_target_and_takes_the_cheaper(
    total, shards, mtbf, target, fraction, clock
):
    job, failures = JobSize(total, shards), ExponentialFailures(mtbf)
    plan = Planner(job, COSTS, failures, fraction=fraction, clock=clock).plan(target)
    full, _, vanilla, *prioritized = plan.strategies
    floor = 2 * COSTS.save_hours / (mtbf * shards)  # lost while saving, however often
    most = target * (1 + 1e-9) + (floor if clock == "running" else 0)
    for strategy in (vanilla, *prioritized):
        assert strategy.expected.pls <= most
        assert strategy.interval_hours <= total
    cheaper = min(full, vanilla, prioritized[1], key=lambda strategy: strategy.overhead_fraction)
    assert plan.recommended.recovery == cheaper.recovery
    assert plan.recommended.overhead_fraction <= full.overhead_fraction
    for strategy in prioritized:
        if clock == "training":
            assert strategy.interval_hours == pytest.approx(vanilla.interval_hours)
        saves = strategy.interval_hours / strategy.save_every_hours
        assert saves == pytest.approx(math.ceil(1 / fraction - 1e-9))


@settings(deadline=None, max_examples=40)
@given(st.floats(0.001, 0.4), st.floats(1.1, 2))
def test_who_accepts_more_loss_pays_no_more(target, factor):
    planner = Planner(JobSize(5000, 8), COSTS, ExponentialFailures(28))
    strict, lax = planner.plan(target), planner.plan(target * factor)
    slack = COSTS.save_hours / 5000  # one whole save
    assert lax.strategies[2].overhead_fraction <= strict.strategies[2].overhead_fraction + slack


def test_bytes_per_hour_by_hand():
    # 90 GB of large tables, 10 GB saved whole each time.
    plan = preset_plan("abstract-56h", state_bytes=StateBytes(90e9, 10e9), fraction=0.125)
    full, _, vanilla, _, mfu, _ = plan.strategies
    assert full.bytes_per_hour == pytest.approx(100e9 / 2.24)
    assert vanilla.bytes_per_hour == pytest.approx(100e9 / 44.8)
    assert mfu.bytes_per_hour == pytest.approx((0.125 * 90e9 + 10e9) / 5.6)
    # 10 saves, each of 21.25 % of the bytes.
    assert mfu.expected.overhead.save_hours == pytest.approx(10 * 0.2125 * 5.3 / 60)
    assert preset_plan("abstract-56h").strategies[0].bytes_per_hour is None


@pytest.mark.parametrize(
    ("failures", "clock", "why"),
    [
        (ExponentialFailures(28), "training", None),
        (ExponentialFailures(28), "running", None),
        (GammaFailures(0.7, 40), "training", "shape 0.70"),
        (GammaFailures(1.005, 28), "training", None),
        (GammaFailures(1.005, 28), "running", "redone"),
        (EmpiricalFailures((20.0, 36.0)), "training", "times that were seen"),
    ],
)
def test_it_simulates_where_the_formulas_do_not_hold_and_says_why(failures, clock, why):
    plan = Planner(JobSize(56, 8), COSTS, failures, clock=clock).plan(0.1)
    assert all(strategy.is_simulated == (why is not None) for strategy in plan.strategies)
    assert ("simulated" in plan.notes[0]) == (why is not None)
    assert why is None or why in plan.notes[0]


def test_times_noted_in_whole_hours_do_not_fall_in_step_with_saves():
    log = times_to_failure([9.0, 12, 21, 30] * 5)
    failures = fit_failures(log, "empirical").model
    planner = Planner(JobSize(120, 16), COSTS, failures)
    # Every 3 h is a moment just after a save: 0.05 h later nothing must change.
    lost = [
        planner.full_recovery(interval).expected.overhead.lost_computation_hours
        for interval in (3.0, 2.95)
    ]
    assert lost[0] == pytest.approx(lost[1], rel=0.1)


def test_a_long_job_needs_no_simulation_for_a_gamma_model():
    failures = GammaFailures(0.7, 40)
    assert Planner(JobSize(100, 8), COSTS, failures).why_simulated is not None
    planner = Planner(JobSize(2000, 8), COSTS, failures)
    assert planner.why_simulated is None
    played = Planner(JobSize(2000, 8), COSTS, failures)
    played.why_simulated = "for this test"
    for interval in (1.0, 20.0):
        assert planner.full_recovery(interval).overhead_fraction == pytest.approx(
            played.full_recovery(interval).overhead_fraction, rel=0.02
        )
        [formula, simulated] = [
            p.partial_recovery("CPR-vanilla", "all", interval).expected for p in (planner, played)
        ]
        assert formula.pls == pytest.approx(simulated.pls, rel=0.02)


def test_failures_that_come_evenly_are_simulated_until_they_no_longer_keep_step_with_saves():
    failures = GammaFailures(100, 0.28)
    assert Planner(JobSize(200 * 28, 8), COSTS, failures).why_simulated is not None
    assert Planner(JobSize(4000 * 28, 8), COSTS, failures).why_simulated is None


def test_a_job_of_very_many_failures_is_played_fewer_times():
    failures = EmpiricalFailures((0.5, 1.5), (), 0.1)
    planner = Planner(JobSize(10_000, 8), COSTS, failures)
    assert planner.histories == 200
    played = planner.partial_recovery("CPR-vanilla", "all", 2.0).expected
    assert played.histories == 200
    assert played.pls_standard_error < 0.005 * played.pls


def test_clustered_failures_shorten_the_interval_until_the_target_holds():
    job, failures = JobSize(56, 8), GammaFailures(0.3, 28 / 0.3)
    plan = Planner(job, COSTS, failures).plan(0.02)
    assert plan.strategies[2].interval_hours < 2 * 0.02 * 8 * 28
    assert plan.strategies[2].expected.pls <= 0.02 * (1 + 1e-9)


@pytest.mark.parametrize("target", [0, 1.01, -0.1])
def test_a_target_that_is_no_share_is_refused(target):
    with pytest.raises(UsageError, match=f"target_pls is {target}"):
        Planner(JobSize(56, 8), COSTS, ExponentialFailures(28)).plan(target)


def test_a_preset_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(UsageError, match="no preset 'x'; there are abstract-56h, production-50h"):
        find_preset("x")
