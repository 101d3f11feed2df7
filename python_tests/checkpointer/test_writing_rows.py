"""Rows that a loop writes itself, inside of writing_rows(), count as changed, and no others."""

import warnings

import pytest
import torch

import cpr_ext
from cpr_ext import StoreOptions
from cpr_ext.errors import UntrackedChangeWarning
from cpr_ext.tracking import table_watch
from python_tests.helpers import Trained, assert_same, copy_rows, short_windows
from python_tests.saving.captured import OPTIONS, TABLES, assert_captured, num_dirty


def make_run(folder, **options):
    """Training that writes some rows of one table before each step, as PyTorch does not count."""
    options = {"priority": cpr_ext.AllRows(), **OPTIONS, "store": StoreOptions(None), **options}
    run = Trained(folder, TABLES, **options)
    run.weight = run.model.tables["a"].weight
    run.written = torch.Generator().manual_seed(0)
    return run


def write(run, count=50):
    rows = torch.randint(0, len(run.weight), (count,), generator=run.written)
    with run.checkpointer.writing_rows("tables.a", rows):
        run.weight.data[rows] = torch.rand(count, 8, generator=run.written)
    return rows


@pytest.mark.parametrize("overlap", ["always", "never"])
def test_a_snapshot_has_them_as_they_were_at_its_steps(tmp_path, overlap):
    run = make_run(tmp_path, overlap=overlap, schedule=cpr_ext.EverySteps(6))
    ckpt, rows, number = run.checkpointer, {}, 0
    with short_windows(), warnings.catch_warnings():
        warnings.simplefilter("error", UntrackedChangeWarning)
        while ckpt.metrics.partial_snapshots < 2:
            number += 1
            write(run, number % 3 * 40)
            generator = torch.Generator().manual_seed(number)
            indices = {name: torch.randint(0, 100, (20,), generator=generator) for name in TABLES}
            run.model(indices, torch.zeros(20, 4)).sum().backward()
            write(run)
            for optimizer in run.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            write(run)
            rows[ckpt.step_count + 1] = copy_rows(ckpt.tables)
            ckpt.step()
    ckpt.wait()
    assert_captured(ckpt, rows)
    assert ckpt.check() == {}
    ckpt.save("partial")
    ckpt.wait()
    live = copy_rows(ckpt.tables)
    ckpt.close()
    again = make_run(tmp_path, seed=1)
    again.checkpointer.recover(mode="full")
    for table, arrays in copy_rows(again.checkpointer.tables).items():
        for name, array in arrays.items():
            assert_same(array, live[table][name])
    again.checkpointer.close()


@pytest.fixture
def saved(tmp_path):
    run = make_run(tmp_path)
    run.train(1)
    run.checkpointer.save("base")
    run.checkpointer.wait()
    yield run
    run.checkpointer.close()


def test_only_they_count(saved):
    run = saved
    assert num_dirty(run.checkpointer) == 0
    rows = write(run)
    assert num_dirty(run.checkpointer) == len(rows.unique())


def test_what_a_block_does_not_name_is_found(saved):
    run = saved
    with run.checkpointer.writing_rows("tables.a", torch.tensor([3])):
        run.weight.data[4] = 1.0
    with pytest.warns(UntrackedChangeWarning, match=r"row 4"):
        assert run.checkpointer.check() == {"tables.a": 4}


def test_they_are_counted_on_the_stream_on_which_the_block_begins(saved, monkeypatch):
    watch, log = saved.checkpointer._watch, []
    monkeypatch.setattr(table_watch, "use_training_streams", lambda devices: log.append("streams"))
    count = watch.count_rows
    monkeypatch.setattr(watch, "count_rows", lambda *given: log.append("count") or count(*given))
    write(saved)
    assert log == ["streams", "count"]
