"""Attributes and gradients that training carries from step to step are saved, or named."""

import copy
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.tracking import carried
from python_tests.checkpointer.test_inventory import OPTIONS, make, train


class Carrying(nn.Linear):
    """Has something of its own that each call changes."""

    def __init__(self, value, change):
        super().__init__(4, 1)
        self.value, self.change = value, change
        self.shape_of_last = None

    def forward(self, rows):
        self.value = self.change(self.value)
        self.output = super().forward(rows)  # it cannot outlive its step
        return self.output


def of_module(value, change):
    def optimizer_of(model):
        model["lin"] = Carrying(copy.deepcopy(value), change)
        return torch.optim.Adagrad(model.parameters(), lr=0.1)

    return optimizer_of


class OwnSteps(torch.optim.Adagrad):
    """Has a counter of its own."""

    updates_only_looked_up_rows = True

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.value = 0

    def step(self, closure=None):
        self.value += 1
        super().step(closure)


def test_a_flag_that_a_trainer_adds_is_no_state(tmp_path):
    run = make(tmp_path, of_module(1, lambda value: value))
    run.model["lin"].is_prepared = run.optimizer.is_prepared = True
    handle, texts = train(run)
    assert (handle.is_complete, texts) == (True, [])
    run.ckpt.close()


def draw(generator):
    torch.rand(1, generator=generator)
    return generator


CASES = {
    "number": of_module(1.0, lambda value: value * 0.9),
    "flag": of_module(False, lambda value: True),
    "tensor": of_module(torch.ones(3), lambda value: value * 0.9),
    "tensor in place": of_module(torch.ones(3), lambda value: value.mul_(0.9)),
    "array": of_module(np.ones(3), lambda value: value * 0.9),
    "list": of_module([], lambda value: [*value, 1.0][-3:]),
    "dict of tensors": of_module({"a": torch.ones(3)}, lambda value: {"a": value["a"] * 0.9}),
    "queue": of_module(deque(maxlen=2), lambda value: value.append(torch.ones(1)) or value),
    "made late": of_module(None, lambda value: torch.ones(2)),
    "generator": of_module(torch.Generator(), draw),
    "of NumPy": of_module(np.random.default_rng(3), lambda value: value.random() and value),
    "optimizer": lambda model: OwnSteps(model.parameters()),
}


def value_of(run):
    owner = run.optimizer if isinstance(run.optimizer, OwnSteps) else run.model["lin"]
    value = owner.value
    return [*value] if isinstance(value, deque) else value


@pytest.mark.parametrize("case", CASES)
def test_an_attribute_that_changes_is_named_unless_its_bits_are_saved(tmp_path, case):
    run = make(tmp_path / "store", CASES[case])
    handle, texts = train(run)
    assert not handle.is_complete
    (text,) = texts
    name = "optimizers[0].value" if case == "optimizer" else "lin.value"
    assert f"the attribute '{name}' of a" in text
    run.ckpt.close()
    run = make(tmp_path / "ignored", CASES[case], ignore=[f"attribute {name}"])
    handle, texts = train(run)
    assert (handle.is_complete, texts) == (True, [])
    run.ckpt.close()


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"generator", "of NumPy"}))
def test_extra_state_that_has_its_bits_accounts_for_it(tmp_path, case):
    run = make(tmp_path / "other", CASES[case], extra_state=lambda: {"epoch": 77})
    assert not train(run)[0].is_complete
    run.ckpt.close()
    run = make(tmp_path / "store", CASES[case], extra_state=lambda: {"value": value_of(run)})
    handle, texts = train(run)
    assert (handle.is_complete, texts) == (True, [])
    run.ckpt.close()


@pytest.mark.parametrize("case", ["generator", "of NumPy"])
def test_a_generator_of_a_module_that_is_given_is_saved(tmp_path, case):
    run = make(tmp_path / "before", CASES[case])
    run.ckpt.close()
    ckpt = cpr_ext.Checkpointer(
        run.model, run.optimizer, tmp_path / "store", stateful=[value_of(run)], **OPTIONS
    )
    run.ckpt = ckpt
    handle, texts = train(run)
    assert (handle.is_complete, texts) == (True, [])
    ckpt.close()


class KnownBySelf(Carrying):
    def get_extra_state(self):
        return {"value": self.value}

    def set_extra_state(self, state):
        self.value = state["value"]


def test_what_keeps_still_or_saves_itself_is_not_named(tmp_path):
    def optimizer_of(model):
        model["lin"] = KnownBySelf(1.0, lambda value: value * 0.9)
        model["drop"] = nn.Dropout(0.5)
        return torch.optim.Adagrad(model.parameters(), lr=0.1)

    run = make(tmp_path / "store", optimizer_of)
    torch.optim.lr_scheduler.StepLR(run.optimizer, 2)
    run.model["lin"].names = ["a", "b"]
    handle, texts = train(run)
    assert handle.is_complete
    assert not [text for text in texts if "attribute" in text]
    run.ckpt.close()


def test_looking_draws_no_random_number(tmp_path):
    carried._names_of_torch.cache_clear()
    run = make(tmp_path, lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1))
    before = torch.get_rng_state()
    run.ckpt.step()
    run.ckpt.close()
    again = make(tmp_path, lambda model: OwnSteps(model.parameters()))
    assert torch.equal(before, torch.get_rng_state())
    again.ckpt.close()


def gradients(run, step, *, optimizer_steps, zero=None):
    """Train a step; the optimizer need not step, and gradients may stay."""
    rows = torch.randint(0, 300, (8,), generator=torch.Generator().manual_seed(step))
    run.model["lin"](run.model["emb"](rows)).square().mean().backward()
    if optimizer_steps:
        run.optimizer.step()
    if zero is not None:
        run.optimizer.zero_grad(set_to_none=zero)
    handle = run.ckpt.step()
    run.ckpt.wait()
    return handle.is_complete


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_that_wait_for_their_optimizer_are_no_full_recovery_point(tmp_path, sparse):
    def optimizer_of(model):
        model["emb"].sparse = sparse
        return torch.optim.Adagrad(model.parameters(), lr=0.1)

    run = make(tmp_path, optimizer_of)
    assert gradients(run, 1, optimizer_steps=True)  # they stay, but are applied
    with pytest.warns(cpr_ext.errors.UntrackedChangeWarning, match="a gradient that waits for"):
        assert not gradients(run, 2, optimizer_steps=False)
    assert not gradients(run, 3, optimizer_steps=False)
    assert gradients(run, 4, optimizer_steps=True, zero=True)
    assert not gradients(run, 5, optimizer_steps=False)
    assert gradients(run, 6, optimizer_steps=True, zero=sparse)
    assert gradients(run, 7, optimizer_steps=False, zero=sparse)  # a step that is left out
    assert run.ckpt.save("base").is_complete
    run.ckpt.close()


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.EmbeddingBag(20, 4, sparse=True)
        self._calls = 0

    def forward(self, indices):
        self._calls += 1
        return self.rows(indices) * (1 + 0.1 * self._calls)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["epoch", "calls", "_calls"])
def test_a_number_counts_as_saved_under_its_own_name_only(tmp_path, name):
    """The epoch may have the same number as something else by chance."""
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"schedule": cpr_ext.EverySteps(10**6), "save_at_close": False}
    options["extra_state"] = lambda: {name: model._calls}
    with cpr_ext.Checkpointer(model, optimizer, tmp_path, **options) as ckpt:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([[1, 2]])).sum().backward()
            optimizer.step()
            ckpt.step()
            assert ckpt.save("base").is_complete == (name != "epoch")
