"""Changes of tables that no optimizer made: reported once, and saved."""

import pytest
import torch
from torch import nn

import cpr_ext
from python_tests.helpers import die
from python_tests.tracking.watched import NEVER, N, backward, make_plain, plain


def train_rows(run, *rows):
    run.optimizers[0].zero_grad()
    backward(run, *rows)
    run.optimizers[0].step()
    run.ckpt.step()


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.UntrackedChangeWarning")
def test_a_base_in_pieces_between_which_a_table_changed_outside_is_not_complete(tmp_path):
    torch.manual_seed(0)
    model = nn.Embedding(20_000, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    staging = cpr_ext.StagingOptions(slot_bytes=64 << 10, num_threads=1)
    with cpr_ext.Checkpointer(model, optimizer, tmp_path, **{**NEVER, "staging": staging}) as ckpt:
        handle, snapshot = ckpt.step(), ckpt._saver.in_flight
        assert 0 < snapshot.rows.bytes_captured < model.weight.nbytes
        with torch.no_grad():
            model.weight.mul_(0.5)
        ckpt.wait()  # the other rows, at the same step
        assert snapshot.first_step == snapshot.last_step == 1
        assert handle.step == 1
        assert not handle.is_complete
        ckpt.save("base")
        ckpt.wait()
        assert ckpt.store.manifest.dense[-1].is_complete


def freeze(run):
    run.optimizers[0].param_groups.clear()
    run.model.weight.requires_grad_(False)
    run.model.weight.grad = None


def set_to_zero(name):
    def change(run):
        run.optimizers[0].param_groups[0][name] = 0

    return change


@pytest.mark.parametrize(
    ("kind", "options", "change"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, set_to_zero("momentum")),
        (torch.optim.SGD, {"weight_decay": 0.1}, set_to_zero("weight_decay")),
        (torch.optim.Adam, {}, freeze),
    ],
)
def test_rows_moved_without_a_gradient_are_saved_after_the_optimizer_has_ceased_to_move_them(
    tmp_path, kind, options, change
):
    run = plain(tmp_path, kind, sparse=False, optimizer=options)

    train_rows(run, *range(20))
    run.save("base")
    for _ in range(3):
        train_rows(run, 39)  # and rows 0 to 19 by momentum or decay
    change(run)
    if change is not freeze:
        train_rows(run, 39)
    assert run.save().is_complete
    expected = run.model.weight.detach().clone()
    die(run.ckpt)
    model, optimizers = make_plain(kind, sparse=False, **options)
    fresh = cpr_ext.Checkpointer(model, optimizers, tmp_path)
    if change is freeze:
        optimizers[0].param_groups.clear()
    fresh.recover(mode="full")
    assert torch.equal(model.weight, expected)
    fresh.close()


def test_rows_moved_before_the_settings_changed_are_not_said_to_be_fresh(tmp_path):
    run = plain(tmp_path / "store", sparse=False, optimizer={"momentum": 0.9}, num_shards=2)
    train_rows(run, 1, 2)
    run.save("base")
    saved = run.model.weight.detach().clone()
    train_rows(run, 3)  # rows 1 and 2 move by momentum
    run.optimizers[0].param_groups[0]["momentum"] = 0.0
    train_rows(run, 4)
    stale = int((run.model.weight.detach() != saved)[: N // 2].any(dim=1).sum())
    assert stale == 4
    assert run.ckpt.recover(shards=[0]).rows_stale in (None, stale)
