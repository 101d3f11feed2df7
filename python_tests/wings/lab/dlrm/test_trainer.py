"""A whole run: train, fail, recover, evaluate; the same again, and after any interruption."""

import shutil
from dataclasses import replace

import pytest

import cpr_ext
from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.dlrm.failures import PlannedFailure
from cpr_ext.wings.lab.dlrm.movietweetings import MovieTweetings
from cpr_ext.wings.lab.dlrm.presets import find_preset
from cpr_ext.wings.lab.dlrm.synthetic import Synthetic
from cpr_ext.wings.lab.dlrm.trainer import Trainer, TrainOptions
from cpr_ext.wings.lab.report.run_table import format_run
from python_tests.helpers import assert_same, on_devices

TINY = find_preset("tiny")
SOURCE = Synthetic([50, 300, 2000], num_samples=4000)
SETTINGS = replace(SOURCE.recommended, batch_size=50, epochs=2)  # 160 steps
LAST_STEP = 160


def options(store, **changes):
    given = {
        "settings": SETTINGS,
        "store": store,
        "priority": cpr_ext.MostFrequentlyUsed(),
        "every_steps": 20,
        "num_shards": 4,
    }
    return TrainOptions(**{**given, **changes})


def run(store, **changes):
    trainer = Trainer(TINY, SOURCE, options(store, **changes))
    result = trainer.run()
    return result, {name: value.clone() for name, value in trainer._model.state_dict().items()}


class InterruptedRunError(Exception):
    pass


def run_until(step, store, source=SOURCE, **changes):
    """End a run after ``step`` without saving what is not saved by then, as a kill would."""

    def observe(progress):
        if progress.step == step and not progress.message:
            raise InterruptedRunError

    trainer = Trainer(TINY, source, options(store, **changes), observe)
    with pytest.raises(InterruptedRunError):
        trainer.run()


def test_saving_changes_nothing_of_the_training_and_its_figures_add_up(tmp_path):
    result, weights = run(tmp_path / "a")
    unsaved, other = run(None, priority=None)
    assert_same(other, weights)
    assert unsaved.losses == result.losses
    assert unsaved.snapshots == {"base": 0, "partial": 0, "bytes": 0}
    assert unsaved.store is None
    assert (result.steps, result.samples, result.resumed_from_step) == (LAST_STEP, 8000, 0)
    assert (result.pls, result.failures) == (0.0, [])
    assert result.snapshots["base"] + result.snapshots["partial"] == len(result.snapshot_log)
    files = sum(path.stat().st_size for path in (tmp_path / "a").rglob("*.safetensors"))
    assert result.snapshots["bytes"] >= files > 0
    assert 0 < result.stall_seconds["max"] <= result.stall_seconds["total"] < result.seconds
    assert result.samples_per_second == pytest.approx(8000 / result.seconds)


def test_more_epochs_continue_a_finished_run(tmp_path):
    run(tmp_path / "a", settings=replace(SETTINGS, epochs=1))
    longer, _ = run(tmp_path / "a")
    assert longer.resumed_from_step == LAST_STEP // 2
    assert (longer.steps, longer.samples) == (LAST_STEP, 8000)


FAILURES = (PlannedFailure(50, (0, 2)), PlannedFailure(130, (1,)))


def test_partial_recovery_is_recorded_and_goes_on_without_going_back(tmp_path):
    result, _ = run(tmp_path / "a", failures=FAILURES)
    first, second = result.failures
    assert (first["step"], first["shards"], first["recovery"]) == (50, [0, 2], "partial")
    assert first["num_samples"] == 2500
    # Snapshots at steps 1, 21, 41: the shards lose what was trained since.
    assert first["samples_lost"] == 2 * 9 * 50
    assert (second["step"], second["samples_lost"]) == (130, 9 * 50)
    num_rows = 50 + 300 + 2000
    assert 0.4 * num_rows < first["rows_restored"] < 0.6 * num_rows
    assert 0 < first["rows_stale"] < first["rows_restored"]
    assert result.pls == pytest.approx((2 * 450 + 450) / (8000 * 4))
    assert result.pls < result.share_of_row_updates_lost < 1  # PLS counts each snapshot as whole
    assert f"row updates lost  {result.share_of_row_updates_lost:.4f} of all" in format_run(result)
    assert (result.steps, result.samples) == (LAST_STEP, 8000)
    assert first["samples_retrained"] == 0


def test_full_recovery_trains_again_from_the_last_common_point_to_the_same_end(tmp_path):
    exact = {"priority": cpr_ext.AllRows(), "recovery": "full"}
    _, weights = run(tmp_path / "straight", **exact)
    result, again = run(tmp_path / "a", failures=FAILURES, **exact)
    assert [failure["samples_retrained"] for failure in result.failures] == [9 * 50, 9 * 50]
    assert result.pls == 0
    assert (result.steps, result.samples) == (LAST_STEP, 8000)
    assert_same(again, weights)


def test_no_recovery_loses_what_the_shards_were_trained_on_since_they_were_last_lost(tmp_path):
    failures = (PlannedFailure(50, (0, 2)), PlannedFailure(130, (1, 2)))
    result, _ = run(None, priority=None, failures=failures, recovery="none")
    first, second = result.failures
    assert first["samples_lost"] == 2 * 2500
    assert second["samples_lost"] == 6500 + (6500 - 2500)
    assert (first["rows_restored"], first["recovery"]) == (0, "none")
    assert first["rows_stale"] > 0
    assert result.pls == pytest.approx((5000 + 6500 + 4000) / (8000 * 4))
    assert result.share_of_row_updates_lost is None
    assert "row updates lost" not in format_run(result)


@pytest.mark.filterwarnings("error::cpr_ext.errors.UntrackedChangeWarning")
def test_no_recovery_saves_what_is_left_without_a_warning(tmp_path):
    lost = {"failures": (PlannedFailure(50, (0, 2)), PlannedFailure(130, (1,)))}
    result, weights = run(tmp_path / "a", recovery="none", **lost)
    assert len(result.failures) == 2
    assert result.snapshots["partial"] > 0
    # Run again, it only loads the model that the last snapshot saved.
    again, loaded = run(tmp_path / "a", recovery="none", **lost)
    assert again.resumed_from_step == LAST_STEP
    assert_same(loaded, weights)


@pytest.mark.parametrize("recovery", ["partial", "full"])
@pytest.mark.parametrize("cut", [1, 49, 61, 62, 81])
@pytest.mark.parametrize("strikes_at", [50, 61])
def test_a_planned_failure_strikes_once_however_the_run_is_interrupted(
    tmp_path, recovery, cut, strikes_at
):
    """Step 61 is the step of a snapshot: what is saved there does not know of the failure yet."""
    changes = {
        "failures": (PlannedFailure(strikes_at, (1,)),),
        "recovery": recovery,
        "priority": cpr_ext.AllRows(),
    }
    straight, weights = run(tmp_path / "straight", **changes)
    run_until(cut, tmp_path / "cut", **changes)
    continued, again = run(tmp_path / "cut", **changes)
    assert 0 < continued.resumed_from_step <= cut
    assert (continued.steps, continued.samples) == (LAST_STEP, 8000)
    assert [f["step"] for f in continued.failures] == [strikes_at]
    assert [f["samples_lost"] for f in continued.failures] == [
        f["samples_lost"] for f in straight.failures
    ]
    if recovery == "full":
        assert_same(again, weights)
        assert (continued.losses, continued.auc) == (straight.losses, straight.auc)


def test_a_store_of_a_run_with_other_settings_is_refused(tmp_path):
    first, _ = run(tmp_path / "a", max_steps=30)
    for changes, told in (
        ({"seed": 3}, "seed was 0, now 3"),
        ({"settings": replace(SETTINGS, table_lr=0.5)}, "settings was"),
        ({"settings": replace(SETTINGS, batch_size=25)}, "settings was"),
    ):
        with pytest.raises(UsageError, match=f"other settings: {told}.*another --store"):
            run(tmp_path / "a", **changes)
    again, _ = run(tmp_path / "a", max_steps=30)
    assert again.auc == first.auc


def test_options_that_cannot_be_are_refused_with_their_value_before_anything_is_made(tmp_path):
    for changes, told in (
        ({"num_shards": 0}, "shards is 0"),
        ({"failures": (PlannedFailure(3, (4,)),)}, "shards from 0 to 3"),
    ):
        with pytest.raises(UsageError, match=told):
            options(tmp_path / "a", **changes)
    for changes, told in (
        ({"table_lr": 0.0}, "table_lr is 0.0"),
        ({"dense_lr": float("nan")}, "dense_lr is nan"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"epochs": -1}, "epochs is -1"),
    ):
        with pytest.raises(UsageError, match=told):
            replace(SETTINGS, **changes)
    with pytest.raises(UsageError, match="planned after step 161, but the run has 160 steps"):
        run(tmp_path / "a", failures=(PlannedFailure(161, (0,)),))
    with pytest.raises(UsageError, match="but the run has 10 steps"):
        run(tmp_path / "a", failures=(PlannedFailure(11, (0,)),), max_steps=10)
    assert not (tmp_path / "a").exists()


@on_devices
def test_on_movietweetings_partial_recovery_keeps_the_auc_that_no_recovery_loses(
    tmp_path, real_movietweetings, device
):
    """Half of the shards lost near the end; one seed of the three that count."""
    source = MovieTweetings(real_movietweetings)
    settings = source.recommended
    steps = settings.epochs * -(-source.num_train_samples // settings.batch_size)
    fails_at = int(0.95 * steps)
    failures = (PlannedFailure(fails_at, (0, 2, 4, 6)),)
    given = {"settings": settings, "every_steps": 100, "num_shards": 8, "device": device}
    # The first part is the same three times, so it is trained once, and resumed without a loss.
    shared = int(0.75 * steps)
    run_until(shared, tmp_path / "straight", source, **given, priority=cpr_ext.AllRows())
    auc = {}
    for name, changes in {
        "partial": {"failures": failures},
        "none": {"failures": failures, "recovery": "none"},
        "straight": {},
    }.items():
        store = tmp_path / name
        if name != "straight":
            shutil.copytree(tmp_path / "straight", store)
        result = Trainer(TINY, source, options(store, **given, **changes)).run()
        assert (result.steps, len(result.failures)) == (steps, len(changes.get("failures", ())))
        assert shared - 100 < result.resumed_from_step <= shared
        auc[name] = result.auc

    assert auc["straight"] >= 0.79, auc
    assert abs(auc["partial"] - auc["straight"]) < 0.005, auc
    assert auc["none"] < auc["straight"] - 0.02, auc
