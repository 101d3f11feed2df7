"""Whole runs, small ones: trained, failed, recovered, charged."""

import json
from dataclasses import replace

import pytest
import torch

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.emulation.run_strategy import Training, play
from cpr_ext.wings.lab.emulation.scenario import STRATEGIES, Scenario, find_scenario
from cpr_ext.wings.policy import JobCosts, JobSize, ParityCosts

# 56 hours in 112 steps: half an hour each.
STEPS, SEED = 112, 6
TRAINING = Training("synthetic", max_steps=STEPS)
SCENARIO = Scenario(
    name="small",
    job=JobSize(56, 8, 2),
    mtbf_hours=28,
    costs=JobCosts(0.1, 0.05, 0.02, 0.07),
    pls_target=0.2,
    num_failures=3,
    parity=ParityCosts(4, steady_share=0.02, rebuild_hours=0.4, rebuild_stall=0.25),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("play") / "store"
    played = {name: play(SCENARIO, name, TRAINING, SEED, store) for name in STRATEGIES}
    assert not store.exists()
    return json.loads(json.dumps(played, allow_nan=False))


def test_every_strategy_meets_the_failures_that_were_drawn(runs):
    drawn = SCENARIO.draw_failures(SEED)
    assert len(drawn) == 3
    assert runs["no-failure"]["failures"] == []
    for name in set(STRATEGIES) - {"no-failure"}:
        met = runs[name]["failures"]
        assert [failure["shards"] for failure in met] == [list(f.shards) for f in drawn]
        for played, expected in zip(met, drawn, strict=True):
            assert played["hour"] == pytest.approx(expected.hour, abs=0.26)  # half a step


def test_full_recovery_ends_where_a_run_without_failure_ends(runs):
    assert runs["full"]["auc"] == runs["no-failure"]["auc"]
    assert runs["full"]["logloss"] == runs["no-failure"]["logloss"]
    assert runs["full"]["pls"] == 0


def test_full_recovery_is_charged_what_it_computes_again(runs):
    run = runs["full"]
    lost = []
    for failure in run["failures"]:
        last_save = max((hour for hour in run["saves"] if hour <= failure["hour"]), default=0.5)
        lost.append(failure["hour"] - last_save)  # the first step ends at 0.5 h and is saved
    overhead = run["overhead"]
    assert overhead["lost_computation_hours"] == pytest.approx(sum(lost))
    assert overhead["save_hours"] == pytest.approx(0.1 * len(run["saves"]))
    assert overhead["load_hours"] == pytest.approx(3 * 0.05)
    assert overhead["reschedule_hours"] == pytest.approx(3 * 0.07)
    assert overhead["parity_hours"] == 0
    assert run["overhead_share"] == pytest.approx(sum(overhead.values()) / 56)


def test_saves_come_at_the_interval_and_lost_work_is_saved_once(runs):
    every = SCENARIO.strategy("full").save_every_hours
    steps = round(every / 0.5)
    expected = [0.5 * step for step in range(1 + steps, STEPS, steps)]
    assert runs["full"]["saves"] == pytest.approx(expected)
    assert runs["partial"]["saves"] == pytest.approx(expected)
    assert len(runs["cpr-mfu"]["saves"]) > len(runs["cpr-vanilla"]["saves"])


def test_strategies_of_one_target_are_compared_at_one_pls(runs):
    compared = {runs[name]["pls"] for name in ("cpr-vanilla", "cpr-scar", "cpr-mfu", "cpr-ssu")}
    assert len(compared) == 1
    assert 0 < runs["partial"]["pls"] < compared.pop()


def test_partial_recovery_loses_rows_and_goes_on(runs):
    for name in ("partial", "cpr-vanilla", "cpr-mfu"):
        run = runs[name]
        assert run["steps"] == STEPS
        assert run["overhead"]["lost_computation_hours"] == 0
        assert run["overhead"]["load_hours"] == pytest.approx(3 * 0.02)
        assert any(failure["rows_stale"] for failure in run["failures"])
        assert run["auc"] != runs["no-failure"]["auc"]


def test_parity_loses_what_double_losses_take_and_nothing_else(runs):
    """Groups 0-3 and 4-7; a failure takes two shards."""
    run = runs["parity"]
    for failure in run["failures"]:
        is_double = failure["shards"][0] // 4 == failure["shards"][1] // 4
        assert failure["is_by_parity"] == (not is_double)
        assert (failure["rows_restored"] > 0) == is_double
    doubles = sum(not failure["is_by_parity"] for failure in run["failures"])
    assert len(run["running_pls"]) == doubles == 1
    assert run["overhead"]["parity_hours"] == pytest.approx(0.02 * 56)
    assert run["overhead"]["load_hours"] == pytest.approx(3 * 0.1 + 0.02)
    assert run["auc"] != runs["no-failure"]["auc"]


def test_a_run_is_the_same_when_it_is_played_again(runs, tmp_path):
    again = json.loads(json.dumps(play(SCENARIO, "cpr-ssu", TRAINING, SEED, tmp_path / "store")))
    timed = {"train_seconds", "stall_seconds", "failures", "bytes_written"}
    # Headers have numbers of the process in decimal digits, such as its generators' states.
    assert again["bytes_written"] == pytest.approx(runs["cpr-ssu"]["bytes_written"], rel=1e-4)
    for figure in runs["cpr-ssu"].keys() - timed:
        assert again[figure] == runs["cpr-ssu"][figure], figure


def test_an_interval_below_a_step_is_refused(tmp_path):
    short = replace(find_scenario("abstract-56h"), pls_target=0.0001)
    with pytest.raises(UsageError, match="cannot be played"):
        play(short, "cpr-mfu", replace(TRAINING, max_steps=20), 0, tmp_path / "store")
