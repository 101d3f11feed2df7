"""The snapshot that ``close()`` takes: when it does, of what, and what is said when it cannot."""

import logging

import pytest
import torch

import cpr_ext
from cpr_ext.errors import SnapshotError
from python_tests.helpers import Trained, array_offset, flip, make_indices, row_records
from python_tests.saving.halves import Steps

NEVER = cpr_ext.EverySteps(10**9)


def trained(tmp_path, **options):
    return Trained(tmp_path, save_at_close=True, schedule=NEVER, **options)


def state_of(run):
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def assert_saved(tmp_path, expected, step, **options):
    fresh = Trained(tmp_path, seed=7, **options)
    with fresh.checkpointer as checkpointer:
        report = checkpointer.recover()
        assert (report.step, report.rows_stale) == (step, 0)
    torch.testing.assert_close(state_of(fresh), expected, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
@pytest.mark.parametrize("priority", [cpr_ext.MostFrequentlyUsed(0.125), cpr_ext.AllRows()])
def test_a_clean_end_loses_no_step(tmp_path, priority, optimizer):
    run = trained(tmp_path, priority=priority, optimizer=optimizer)
    with run.checkpointer:
        run.train(1)
        run.checkpointer.wait()
        run.train(6)
        expected = state_of(run)
    assert_saved(tmp_path, expected, 7, optimizer=optimizer)
    metrics = run.checkpointer.metrics
    is_partial = isinstance(priority, cpr_ext.AllRows) and optimizer == "adagrad"
    assert (metrics.base_snapshots, metrics.partial_snapshots) == ((1, 1) if is_partial else (2, 0))


def test_what_a_partial_snapshot_of_the_last_step_left_out_is_saved(tmp_path):
    run = trained(tmp_path, tables={"big": (4000, 4), "small": (3, 2)}, lookups=400)
    with run.checkpointer as checkpointer:
        run.train(5)
        checkpointer.save("partial").wait_until_done()
        assert not run.store.manifest.dense[-1].is_complete
        expected = state_of(run)
    assert run.store.manifest.dense[-1].is_complete
    assert_saved(tmp_path, expected, 5, tables=run.tables)


def test_rows_whose_saved_state_is_damaged_are_saved_again(tmp_path):
    """A lost shard showed the damage; the live rows of the others are the last there are."""
    run = trained(tmp_path, tables={"a": (60, 3)}, num_shards=4)
    with run.checkpointer as checkpointer:
        run.train(3)
        checkpointer.save("base")
        checkpointer.wait()
        ((_, path),) = row_records(run.store)
        flip(path, array_offset(path, "tables.a/weight"))
        assert checkpointer.recover(shards=[1]).rows_missing == 15
        expected = state_of(run)
    assert_saved(tmp_path, expected, 3, tables=run.tables)


def test_nothing_is_saved_twice_or_untrained(tmp_path):
    run = trained(tmp_path)
    run.train(3)
    run.checkpointer.save("base").wait_until_done()
    run.checkpointer.close()
    assert run.checkpointer.metrics.base_snapshots == 2
    again = trained(tmp_path)
    with again.checkpointer as checkpointer:
        checkpointer.recover()
    assert checkpointer.metrics.base_snapshots == 0
    with trained(tmp_path).checkpointer as unrecovered:
        pass
    assert unrecovered.store.last_snapshot == run.store.last_snapshot


def test_steps_before_a_recovery_are_not_to_be_saved(tmp_path):
    run = trained(tmp_path)
    run.train(1)
    run.checkpointer.wait()
    run.train(2)
    run.checkpointer.recover()
    run.checkpointer.close()
    assert run.store.manifest.dense[-1].last_step == 1


def test_an_exception_saves_nothing_and_says_so(tmp_path, caplog):
    run = trained(tmp_path)
    run.train(1)
    run.checkpointer.wait()
    run.train(4)
    with pytest.raises(KeyError), run.checkpointer:
        raise KeyError
    assert run.store.manifest.dense[-1].last_step == 1
    text = "nothing more is saved: the newest snapshot is of step 1, training is at step 5"
    assert text in caplog.text


def test_in_the_middle_of_a_step_nothing_is_saved_and_it_is_said(tmp_path, caplog):
    steps = Steps(tmp_path, save_at_close=True)
    for _ in range(2):
        steps.backward()
        steps.update()
        steps.checkpointer.step()
        steps.checkpointer.wait()
    steps.backward()
    steps.update()
    steps.checkpointer.close()
    assert steps.store.manifest.dense[-1].last_step == 1
    assert "close() saves nothing in the middle of a step: the newest" in caplog.text


def test_it_can_be_left_out(tmp_path, caplog):
    run = trained(tmp_path)
    run.checkpointer.close()
    caplog.set_level(logging.INFO, "cpr_ext")
    off = Trained(tmp_path / "off", schedule=NEVER, save_at_close=False)
    with off.checkpointer:
        off.train(1)
        off.checkpointer.wait()
        off.train(2)
    assert off.store.manifest.dense[-1].last_step == 1
    assert "close(save=False) saves nothing: the newest snapshot is of step 1" in caplog.text


def test_a_model_that_nobody_can_save_is_not_saved(tmp_path, caplog):
    """An optimizer that was not passed updates a table: no snapshot would be right."""
    run = trained(tmp_path)
    run.train(1)
    run.checkpointer.wait()
    run.train(1)
    other = torch.optim.SGD(run.model.tables.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    indices = make_indices(run.model, generator, 4)
    run.model(indices, torch.randn(3, 4, generator=generator)).backward()
    other.step()
    run.checkpointer.close()
    assert run.store.manifest.dense[-1].last_step == 1
    assert "close() saves nothing: the newest snapshot is of step 1" in caplog.text


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.SnapshotFailedWarning")
def test_a_last_snapshot_that_fails_raises(tmp_path):
    run = trained(tmp_path)
    run.train(1)
    run.checkpointer.wait()
    run.train(1)
    with torch.no_grad():
        run.model.linear.weight.fill_(torch.nan)
    with pytest.raises(SnapshotError, match="holds NaN"):
        run.checkpointer.close()
    assert run.store.manifest.dense[-1].last_step == 1
