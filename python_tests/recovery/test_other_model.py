"""A model that differs from the store's takes what they share; all else stays, and is named."""

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.wings.tools.maintenance import import_checkpoint
from python_tests.helpers import assert_same

OPTIMIZERS = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}
KEPT = ("below.weight", "below.bias")


def make(kind, *, rows=50, width=3, seed=0):
    torch.manual_seed(seed)
    model = nn.ModuleDict({"t": nn.EmbeddingBag(rows, 4), "below": nn.Linear(4, 3)})
    if width != 3:
        model["new"] = nn.Linear(3, width)
    return model, OPTIMIZERS[kind](list(model.parameters()))


def train(model, optimizer, steps):
    draw = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        out = model["below"](model["t"](torch.randint(0, 50, (8, 2), generator=draw)))
        (model["new"](out) if "new" in model else out).square().mean().backward()
        optimizer.step()


def state_of(model, optimizer):
    """By name of a parameter: its values and its optimizer's state."""
    return {
        name: (value.detach().clone(), {k: torch.as_tensor(v).clone() for k, v in state.items()})
        for name, value in model.named_parameters()
        for state in [optimizer.state.get(value, {})]
    }


@pytest.fixture
def stored(tmp_path, request):
    """The kind of optimizer, a store of a trained model, and its state."""
    model, optimizer = make(request.param)
    options = {"priority": cpr_ext.AllRows()}
    with cpr_ext.Checkpointer(model, optimizer, tmp_path / "old", **options) as checkpointer:
        checkpointer.recover()
        train(model, optimizer, 3)
        checkpointer.step(8)
    return request.param, tmp_path / "old", state_of(model, optimizer)


@pytest.mark.parametrize("stored", OPTIMIZERS, indirect=True)
@pytest.mark.parametrize("many", [False, True], ids=["one store", "a list of stores"])
@pytest.mark.parametrize("change", [{"width": 2}, {"rows": 70}], ids=["a layer", "rows"])
def test_state_of_parameters_in_common_returns_and_all_else_is_named(
    tmp_path, stored, many, change
):
    kind, store, before = stored
    model, optimizer = make(kind, seed=1, **change)
    fresh = state_of(model, optimizer)
    with cpr_ext.Checkpointer(model, optimizer, tmp_path / "new") as checkpointer:
        report = checkpointer.recover(from_store=[store] if many else store, strict=False)
        after = state_of(model, optimizer)
        for name in (*KEPT, *(["t.weight"] if "rows" not in change else [])):
            assert_same(after[name], before[name])
        for name in after.keys() - before.keys():
            assert_same(after[name], fresh[name])
            assert any(f"'{name}'" in text and "state" in text for text in report.differences)
        train(model, optimizer, 1)
        checkpointer.step(8)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("bare", [False, True])
def test_a_checkpoint_without_optimizer_state_leaves_that_of_the_model(tmp_path, kind, bare):
    old, optimizer = make(kind)
    train(old, optimizer, 3)
    saved = old.state_dict()
    tree = saved if bare else {"model": saved, "optimizer": optimizer.state_dict()}
    torch.save(tree, tmp_path / "old")
    import_checkpoint(tmp_path / "old", tmp_path / "store", step=3)
    model, optimizer = make(kind, seed=1)
    fresh = state_of(model, optimizer)
    with cpr_ext.Checkpointer(model, optimizer, tmp_path / "new") as checkpointer:
        report = checkpointer.recover(from_store=[tmp_path / "store"], strict=False)
        assert_same(dict(model.state_dict()), dict(saved))
        for name, (_, state) in state_of(model, optimizer).items():
            assert_same(state, fresh[name][1])
        assert report.step == 3
        train(model, optimizer, 1)
        checkpointer.step(8)


@pytest.mark.parametrize("stored", OPTIMIZERS, indirect=True)
def test_a_layer_of_another_name_takes_nothing_of_the_one_in_its_place(tmp_path, stored):
    kind, store, before = stored
    model, optimizer = make(kind, seed=1)
    renamed = nn.ModuleDict({"t": model["t"], "other": model["below"]})
    fresh = state_of(renamed, optimizer)
    with cpr_ext.Checkpointer(renamed, optimizer, tmp_path / "new") as checkpointer:
        checkpointer.recover(from_store=store, strict=False)
        after = state_of(renamed, optimizer)
    assert_same(after["t.weight"], before["t.weight"])
    for name in ("other.weight", "other.bias"):
        assert_same(after[name], fresh[name])
