"""Steps that no hook sees, as those of a replayed CUDA graph; here rows change behind PyTorch."""

import warnings

import pytest
import torch

from cpr_ext.errors import UntrackedChangeWarning
from cpr_ext.state.table import Table, register_tables
from cpr_ext.tracking import unseen_steps
from cpr_ext.tracking.unseen_steps import UnseenSteps
from python_tests.tracking.watched import backward, make_plain, plain


@pytest.fixture
def replayable(tmp_path, monkeypatch):
    """A watched model with a table that a graph could change."""
    monkeypatch.setattr(unseen_steps, "can_be_replayed", lambda table: True)
    with pytest.warns(UntrackedChangeWarning, match="may have changed unseen"):
        run = plain(tmp_path)  # which calls step() without a step of the optimizer
    run.ckpt._watch.changes._reported.clear()
    yield run
    if not run.ckpt._guard.is_closed:
        run.ckpt._release()


def train(run, *rows):
    run.optimizers[0].zero_grad()
    backward(run, *rows)
    run.optimizers[0].step()
    run.ckpt.step()


def replay(run, *rows):
    run.model.weight.data[list(rows)] += 1.0  # moves no version counter
    run.ckpt.step()


def test_steps_that_are_not_seen_any_more_are_noticed_and_all_rows_are_saved(replayable):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            train(replayable, 1, 2)
    assert replayable.dirty() == [1, 2]
    assert replayable.save().is_complete
    with pytest.warns(UntrackedChangeWarning, match="table 'embedding' may have changed unseen"):
        replay(replayable, 5, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replay(replayable, 11)
    assert not replayable.ckpt._watch.changes.is_proven(replayable.ckpt.tables[0])
    replayable.save()
    replayable.assert_recovers(make_plain)


def test_each_step_counts_anew(replayable):
    with pytest.warns(UntrackedChangeWarning):
        replay(replayable, 5)
    replayable.save()
    train(replayable, 1)
    assert replayable.dirty() == [1]
    replay(replayable, 6)
    replayable.save()
    replayable.assert_recovers(make_plain)


def test_a_listener_hears_of_a_step_that_was_not_seen(replayable):
    heard = []

    class Listener:
        def before_change(self, table, row_ids):
            heard.append(row_ids.tolist())

        def changed_outside(self, table):
            heard.append(table.name)

    replayable.ckpt._watch.changes.listener = Listener()
    train(replayable, 3)
    with pytest.warns(UntrackedChangeWarning):
        replay(replayable, 5)
    assert heard == [[3], "embedding"]


def test_a_table_on_the_cpu_may_rest(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.ckpt.step()
    assert run.ckpt._watch.changes.is_proven(run.ckpt.tables[0])


class Source:
    def attach(self, note):
        return []


def test_what_shows_a_step_is_the_optimizer_or_the_source_of_lookups(monkeypatch):
    monkeypatch.setattr(unseen_steps, "can_be_replayed", lambda table: True)
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    tables = [
        *register_tables({"stepped": weight, "frozen": torch.zeros(4, 2)}, [optimizer]),
        Table("fused", torch.zeros(4, 2), lookups=Source()),
    ]
    steps = UnseenSteps(tables)
    unseen = steps.end_step()
    assert sorted(unseen) == [0, 2]
    assert "step of its optimizer" in unseen[0]
    assert "no lookup was seen" in unseen[2]
    steps.note_seen([0])
    assert sorted(steps.end_step()) == [2]
    steps.note_captured(2, is_counted=True)
    assert sorted(steps.end_step()) == [0]
    steps.note_captured(0, is_counted=False)
    steps.note_seen([0])
    assert "dense gradients" in steps.end_step()[0]
    assert steps.captured == {0, 2}
