"""Optimizers that are not known earn trust by passes of the scrub; only then rows count."""

import logging

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.errors import UntrackedChangeWarning
from cpr_ext.saving import table_scrub
from python_tests.tracking.watched import Watched

N = 400


class Own(torch.optim.Optimizer):
    """Like SGD; every ``period`` steps it moves rows without a gradient, too."""

    def __init__(self, parameters, lr=0.1, period=0):
        super().__init__(parameters, {"lr": lr, "steps": 0, "period": period})

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        group["steps"] += 1
        for parameter in group["params"]:
            rows = parameter.grad.coalesce()
            parameter[rows.indices()[0]] -= 0.1 * rows.values()
            if group["period"] and group["steps"] % group["period"] == 0:
                parameter.mul_(0.5)


def make(period=0):
    torch.manual_seed(0)
    model = nn.Embedding(N, 8, sparse=True)
    return model, Own(model.parameters(), period=period)


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    monkeypatch.setattr(table_scrub, "_STEPS_OF_A_TRIAL", 5)


def train(run, steps, *, scrubs=True):
    scrub = run.ckpt._saver.claims.scrub
    for step in range(steps):
        if scrubs:
            scrub._next_slice = 0.0  # a whole pass: the table is small
        run.optimizers[0].zero_grad()
        run.model(torch.tensor([step % 7])).sum().backward()
        run.optimizers[0].step()
        run.ckpt.step()


def table_of(run):
    (table,) = run.ckpt.tables
    return table


def test_rows_count_once_it_has_left_others_alone_for_some_passes(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cpr_ext.saving")
    run = Watched(tmp_path / "store", *make())
    assert not table_of(run).updates_only_looked_up_rows()
    train(run, 12)
    assert not table_of(run).is_trusted  # two passes over so many steps
    saved = run.save()
    assert saved.is_complete  # of all rows
    train(run, 8)
    assert table_of(run).is_trusted
    assert "a Own leaves rows without a gradient alone" in caplog.text
    run.save()  # what may have moved before is saved once more
    assert run.dirty() == []
    train(run, 3)
    assert run.dirty() == [0, 1, 2]
    assert run.save().is_complete
    (record,) = run.ckpt.store.shards[0].segments[-1:]
    assert record.file_bytes < N * 32
    run.assert_recovers(make)


@pytest.mark.parametrize("period", [1, 4])
def test_one_that_moves_other_rows_is_never_trusted(tmp_path, period):
    run = Watched(tmp_path / "store", *make(period))
    for _ in range(10):
        train(run, 4)
        assert run.save().is_complete  # right after it moved them, and all are saved
        assert not table_of(run).is_trusted
    run.assert_recovers(make)


def test_a_pass_at_once_and_one_without_steps_count_for_nothing(tmp_path):
    run = Watched(tmp_path / "store", *make())
    for _ in range(10):
        run.ckpt.scrub()
    train(run, 30, scrubs=False)
    assert not table_of(run).is_trusted
    run.ckpt.close()


def test_trust_that_was_wrong_is_found_revoked_and_never_given_again(tmp_path):
    run = Watched(tmp_path / "store", *make())
    train(run, 20)
    run.save()
    train(run, 2)
    assert table_of(run).is_trusted
    false = run.save()
    assert false.is_complete
    run.optimizers[0].param_groups[0]["period"] = 1
    with pytest.warns(UntrackedChangeWarning, match="counts as unchanged since it was saved"):
        train(run, 3)
    assert table_of(run).is_trusted is None
    assert not run.newest().is_complete
    run.optimizers[0].param_groups[0]["period"] = 0
    train(run, 40)
    assert table_of(run).is_trusted is None
    assert run.save().is_complete  # of all rows
    run.assert_recovers(make)


def test_optimizers_of_torch_that_are_known_to_move_rows_are_not_tried(tmp_path):
    torch.manual_seed(0)
    model = nn.Embedding(N, 8)
    run = Watched(tmp_path / "store", model, torch.optim.Adam(model.parameters(), lr=0.1))
    assert not table_of(run).may_earn_trust()
    train(run, 40)
    assert not table_of(run).is_trusted
    run.ckpt.close()


def test_decay_ends_partial_tracking_also_of_trusted_ones(tmp_path):
    run = Watched(tmp_path / "store", *make())
    train(run, 20)
    assert table_of(run).updates_only_looked_up_rows()
    run.optimizers[0].param_groups[0]["weight_decay"] = 0.1
    assert not table_of(run).updates_only_looked_up_rows()
    assert not table_of(run).may_earn_trust()
    assert isinstance(run.ckpt, cpr_ext.Checkpointer)
    run.ckpt.close()
