"""The snapshot that ``close()`` takes: when it does, of what, and what is said when it cannot."""

import pytest
import torch

import cpr_ext
from cpr_ext.errors import SnapshotError
from python_tests.helpers import Trained, array_offset, assert_same, flip, make_indices, row_records
from python_tests.saving.halves import Steps

NEVER = cpr_ext.EverySteps(10**9)


def trained(tmp_path, *steps, kind=Trained, **options):
    """A run that has saved after the first of so many steps each."""
    run = kind(tmp_path, **{"save_at_close": True, "schedule": NEVER, **options})
    for number, count in enumerate(steps):
        run.train(count)
        if number == 0:
            run.checkpointer.wait()
    return run


def state_of(run):
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def newest(run):
    return run.store.manifest.dense[-1]


def assert_saved(tmp_path, expected, step, **options):
    fresh = Trained(tmp_path, seed=7, **options)
    report = fresh.checkpointer.recover()
    assert (report.step, report.rows_stale) == (step, 0)
    assert_same(state_of(fresh), expected)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
@pytest.mark.parametrize("priority", [cpr_ext.MostFrequentlyUsed(0.125), cpr_ext.AllRows()])
def test_a_clean_end_loses_no_step(tmp_path, priority, optimizer):
    run = trained(tmp_path, 1, 6, priority=priority, optimizer=optimizer)
    expected = state_of(run)
    with run.checkpointer:
        pass
    assert_saved(tmp_path, expected, 7, optimizer=optimizer)
    metrics = run.checkpointer.metrics
    is_partial = isinstance(priority, cpr_ext.AllRows) and optimizer == "adagrad"
    assert (metrics.base_snapshots, metrics.partial_snapshots) == ((1, 1) if is_partial else (2, 0))


def test_what_a_partial_snapshot_of_the_last_step_left_out_is_saved(tmp_path):
    run = trained(tmp_path, tables={"big": (4000, 4), "small": (3, 2)}, lookups=400)
    with run.checkpointer as checkpointer:
        run.train(5)
        checkpointer.save("partial").wait_until_done()
        assert not newest(run).is_complete
        expected = state_of(run)
    assert newest(run).is_complete
    assert_saved(tmp_path, expected, 5, tables=run.tables)


@pytest.mark.parametrize("part", ["tables.small.weight", "linear.weight"])
def test_what_was_written_after_the_last_step_is_saved(part, tmp_path):
    run = trained(tmp_path, 2)
    run.save("base")
    dict(run.model.named_parameters())[part].data[0] += 1
    expected = state_of(run)
    run.checkpointer.close()
    assert_saved(tmp_path, expected, 2)


def test_rows_whose_saved_state_is_damaged_are_saved_again(tmp_path):
    """A lost shard showed the damage; the live rows of the others are the last there are."""
    run = trained(tmp_path, 3, tables={"a": (60, 3)}, num_shards=4)
    run.save("base")
    ((_, path),) = row_records(run.store)
    flip(path, array_offset(path, "tables.a/weight"))
    assert run.checkpointer.recover(shards=[1]).rows_missing == 15
    expected = state_of(run)
    run.checkpointer.close()
    assert_saved(tmp_path, expected, 3, tables=run.tables)


def test_nothing_is_saved_twice_or_untrained(tmp_path):
    run = trained(tmp_path, 3)
    run.checkpointer.save("base").wait_until_done()
    run.checkpointer.close()
    assert run.checkpointer.metrics.base_snapshots == 2
    for recovers in (True, False):
        again = trained(tmp_path)
        if recovers:
            again.checkpointer.recover()
        again.checkpointer.close()
        assert again.checkpointer.metrics.base_snapshots == 0
    assert again.store.last_snapshot == run.store.last_snapshot


def after_an_error(run):
    with pytest.raises(KeyError), run.checkpointer:
        raise KeyError


def in_mid_step(run):
    run.backward()
    run.update()
    run.checkpointer.close()


def after_a_recovery(run):
    run.checkpointer.recover()
    run.checkpointer.close()


def unwatched(run):
    """An optimizer that was not passed updates a table: no snapshot would be right."""
    generator = torch.Generator().manual_seed(0)
    indices = make_indices(run.model, generator, 4)
    run.model(indices, torch.randn(3, 4, generator=generator)).backward()
    torch.optim.SGD(run.model.tables.parameters(), lr=0.1).step()
    run.checkpointer.close()


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (after_an_error, "nothing more is saved: the newest snapshot is of step 1, training is at"),
        (in_mid_step, "close() saves nothing in the middle of a step: the newest"),
        (lambda run: run.checkpointer.close(save=False), "close(save=False) saves nothing: the ne"),
        (unwatched, "close() saves nothing: the newest snapshot is of step 1"),
        (after_a_recovery, ""),
    ],
)
def test_where_nothing_is_saved_it_is_said(tmp_path, caplog, end, told):
    caplog.set_level("INFO", "cpr_ext")
    run = trained(tmp_path, 1, 2, kind=Steps)
    end(run)
    assert newest(run).last_step == 1
    assert told in caplog.text


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.SnapshotFailedWarning")
def test_a_last_snapshot_that_fails_raises(tmp_path):
    run = trained(tmp_path, 1, 1)
    with torch.no_grad():
        run.model.linear.weight.fill_(torch.nan)
    with pytest.raises(SnapshotError, match="holds NaN"):
        run.checkpointer.close()
    assert newest(run).last_step == 1
