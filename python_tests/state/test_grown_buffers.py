"""Buffers that grow in training are saved and restored; another model is refused as before."""

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.errors import DamageError, StoreError
from cpr_ext.state.dense_state import capture_dense
from cpr_ext.state.grown_buffers import buffer_forms
from python_tests.helpers import assert_same
from python_tests.tracking.watched import NEVER


class Holder(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("kept", buffer)


def open_run(directory, module):
    torch.manual_seed(0)
    model = nn.ModuleDict({"e": nn.Embedding(20, 4), "l": nn.Linear(4, 1), "b": module})
    optimizer = torch.optim.SGD([*model["e"].parameters(), *model["l"].parameters()], lr=0.1)
    ckpt = cpr_ext.Checkpointer(model, optimizer, directory, priority=cpr_ext.AllRows(), **NEVER)
    return model, optimizer, ckpt


def train(directory, module, change, steps=2):
    model, optimizer, ckpt = open_run(directory, module)
    with ckpt:
        ckpt.recover()
        for step in range(steps):
            model["l"](model["e"](torch.tensor([step]))).sum().backward()
            optimizer.step()
            change(model["b"], step)
            ckpt.step()
        assert ckpt.save().wait_until_done()
    return {name: value.clone() for name, value in module.state_dict().items()}


def append(module, step):
    module.kept = torch.cat([module.kept, torch.ones(1) * step])


def set_later(module, step):
    module.kept = torch.full((3,), float(step), dtype=torch.float64)


def vanish(module, step):
    module.kept = None


def observe(module, step):
    module(torch.arange(12.0).reshape(3, 4) + step)


def fake_quant():
    return pytest.importorskip("torch.ao.quantization").default_per_channel_weight_fake_quant()


def nothing(module, step):
    pass


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: Holder(torch.zeros(0)), append),
        (lambda: Holder(None), set_later),
        (lambda: Holder(torch.ones(2)), vanish),
        (fake_quant, observe),
    ],
)
def test_it_returns_in_its_saved_form(make, change, tmp_path):
    first = train(tmp_path / "s", make(), change)
    assert_same(train(tmp_path / "s", make(), nothing, steps=0), first)
    third = train(tmp_path / "s", make(), change, steps=1)  # and grows further from there
    _, _, ckpt = open_run(tmp_path / "s", last := make())
    with ckpt:
        ckpt.recover(mode="full")
    assert_same(dict(last.state_dict()), third)


def test_a_buffer_of_another_shape_that_never_grew_is_another_model(tmp_path):
    train(tmp_path / "s", Holder(torch.zeros(4)), nothing)
    _, _, ckpt = open_run(tmp_path / "s", Holder(torch.zeros(5)))
    with ckpt, pytest.raises(StoreError, match=r"'b.kept' has .* shape \(4,\) in the store"):
        ckpt.recover()


def test_a_list_of_grown_buffers_that_is_none_is_damage():
    model = Holder(torch.zeros(0))
    forms = buffer_forms(model)
    append(model, 1)
    part = capture_dense(model, [], [], {}, forms=forms)
    assert part.tree()["grown"] == ["kept"]
    part.skeleton["grown"] = [3]
    with pytest.raises(DamageError, match="its buffers that grow"):
        part.tree()
