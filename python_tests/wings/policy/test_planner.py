"""The plan: the two presets, the choice between full and partial, what it says, what it keeps."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy import JobCosts, JobSize
from cpr_ext.wings.policy.planner import Planner
from cpr_ext.wings.policy.presets import PRESETS, find_preset

NAMES = ["full", "partial, full's interval", "CPR-vanilla", "CPR-SCAR", "CPR-MFU", "CPR-SSU"]
COSTS = JobCosts(0.1, 0.1, 0.05, 0.05)


def preset_plan(name, **options):
    preset = find_preset(name)
    planner = Planner(preset.job, preset.costs, preset.mtbf_hours, **options)
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


@pytest.mark.parametrize("target", [0, 1.01, -0.1])
def test_a_target_that_is_no_share_is_refused(target):
    with pytest.raises(UsageError, match=f"target_pls is {target}"):
        Planner(JobSize(56, 8), COSTS, 28).plan(target)


def test_a_preset_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(UsageError, match="no preset 'x'; there are abstract-56h, production-50h"):
        find_preset("x")
