"""Rows that a loop writes itself, inside of writing_rows(), count as changed, and no others."""

import warnings

import pytest
import torch

import cpr_ext
from cpr_ext import StoreOptions
from cpr_ext.errors import UntrackedChangeWarning
from cpr_ext.tracking import table_watch
from python_tests.helpers import Trained, assert_same, copy_rows, short_windows
from python_tests.saving.captured import OPTIONS, TABLES, assert_captured


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
    run.save()
    live = run.rows()
    ckpt.close()
    again = make_run(tmp_path, seed=1)
    again.checkpointer.recover(mode="full")
    assert_same(again.rows(), live)


def test_only_they_count_on_the_stream_on_which_the_block_begins(tmp_path, monkeypatch):
    """What a block does not name is found."""
    run = make_run(tmp_path)
    run.train(1)
    run.save("base")
    watch, log = run.checkpointer._watch, []
    monkeypatch.setattr(table_watch, "use_training_streams", lambda devices: log.append("streams"))
    count = watch.count_rows
    monkeypatch.setattr(watch, "count_rows", lambda *given: log.append("count") or count(*given))
    rows = write(run)
    assert log == ["streams", "count"]
    trackers = run.checkpointer._trackers.values()
    assert sum(tracker.num_dirty() for tracker in trackers) == len(rows.unique())
    monkeypatch.undo()
    row = next(row for row in range(len(run.weight)) if row not in rows)
    with run.checkpointer.writing_rows("tables.a", torch.tensor([row + 1])):
        run.weight.data[row] = 1.0
    with pytest.warns(UntrackedChangeWarning, match=f"row {row}"):
        assert run.checkpointer.check() == {"tables.a": row}
