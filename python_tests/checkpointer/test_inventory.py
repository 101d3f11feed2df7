"""What training carries from step to step is saved, or named and never called complete."""

import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import cpr_ext
from cpr_ext.errors import UntrackedChangeWarning, UsageError
from python_tests.helpers import assert_same, die, open_checkpointer

N = 300
OPTIONS = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(1), "save_at_close": False}


def make_model():
    torch.manual_seed(0)
    return nn.ModuleDict({"emb": nn.Embedding(N, 4), "lin": nn.Linear(4, 1)})


def train(run, steps=4, first=0):
    """Train; returns the handle of the last snapshot, and the warnings."""
    handle = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(first, first + steps):
            rows = torch.randint(0, N, (8,), generator=torch.Generator().manual_seed(step))
            run.optimizer.zero_grad()
            run.model["lin"](run.model["emb"](rows)).square().mean().backward()
            run.optimizer.step()
            handle = run.ckpt.step() or handle
            run.ckpt.wait()
    texts = [str(each.message) for each in warned if each.category is UntrackedChangeWarning]
    return handle, texts


def make(directory, optimizer_of, *, given=None, model=None):
    model = make_model() if model is None else model
    optimizer = optimizer_of(model)
    given = optimizer if given is None else given(optimizer)
    ckpt = open_checkpointer(model, given, directory, **OPTIONS)
    return SimpleNamespace(model=model, optimizer=optimizer, ckpt=ckpt)


def resumed(run, directory, optimizer_of, *, change=lambda run: None, model=None):
    """What another process recovers after this one was killed, and its report."""
    die(run.ckpt)
    fresh = make(directory, optimizer_of, model=model)
    change(fresh)
    return fresh, fresh.ckpt.recover()


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01}),
    ],
)
def test_the_state_of_a_table_that_an_optimizer_gets_later_is_saved(tmp_path, kind, options):
    def add_table(run):
        run.optimizer.add_param_group({"params": [run.model["emb"].weight]})

    def of_head(model):
        return kind(model["lin"].parameters(), **options)

    run = make(tmp_path, of_head)
    train(run)
    add_table(run)
    handle, _ = train(run, first=4)
    assert handle.is_complete
    live = {name: value.clone() for name, value in run.ckpt.tables[0].arrays().items()}
    fresh, report = resumed(run, tmp_path, of_head, change=add_table)
    assert (report.step, report.is_complete) == (8, True)
    assert_same(dict(fresh.ckpt.tables[0].arrays()), live)


def test_a_module_that_is_replaced_is_refused_with_the_remedy(tmp_path):
    run = make(tmp_path, adagrad)
    train(run)
    run.model["emb"] = nn.Embedding(N, 4)
    run.optimizer.add_param_group({"params": [run.model["emb"].weight]})
    with pytest.raises(UsageError, match=r"'emb'.*is not in the model any more; make a new"):
        train(run, 1)


class Wrapper(torch.optim.Optimizer):
    """Has the parameters, and another optimizer that has the state."""

    def __init__(self, parameters):
        self.inner = torch.optim.Adagrad(list(parameters), lr=0.1)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step()


class Combined(Wrapper):
    """As TorchRec's CombinedOptimizer: its state is put together at each look."""

    state = property(lambda self: {**self.inner.state}, lambda self, value: None)


def test_an_optimizer_inside_of_a_wrapper_is_named_at_once(tmp_path):
    run = make(tmp_path / "wrapper", lambda model: Wrapper(model.parameters()))
    handle, texts = train(run)
    assert not handle.is_complete
    assert [text for text in texts if "the state of a Adagrad that steps" in text]
    inner = make(
        tmp_path / "inner", lambda model: Wrapper(model.parameters()), given=lambda o: o.inner
    )
    handle, texts = train(inner)
    assert (handle.is_complete, texts) == (True, [])
    with pytest.raises(UsageError, match=r"a Combined shows a copy of the state.*give those"):
        make(tmp_path / "combined", lambda model: Combined(model.parameters()))


def with_second_model(model):
    other = nn.Linear(3, 1)
    other.weight.grad = torch.ones(1, 3)
    return torch.optim.Adagrad([*model.parameters(), other.weight], lr=0.1)


def test_a_parameter_that_no_state_dict_has_is_named_once_and_no_snapshot_is_complete(tmp_path):
    run = make(tmp_path, with_second_model)
    handle, (text,) = train(run)
    assert not handle.is_complete
    assert not run.ckpt.save("base").is_complete
    assert "a parameter of shape (1, 3) that a Adagrad updates" in text


class Global(torch.optim.Adagrad):
    def step(self, closure=None):
        self.state["global"] = {"t": self.state.get("global", {}).get("t", 0) + 1}
        super().step()


def test_what_an_optimizer_keeps_under_no_parameter_returns(tmp_path):
    def optimizer_of(model):
        return Global(model.parameters(), lr=0.1)

    run = make(tmp_path, optimizer_of)
    handle, texts = train(run, 4)
    assert (handle.step, texts) == (4, [])

    def change(fresh):
        fresh.optimizer.state["made since"] = {"t": 1}

    again, _ = resumed(run, tmp_path, optimizer_of, change=change)
    others = {k: v for k, v in again.optimizer.state.items() if isinstance(k, str)}
    assert others == {"global": {"t": 4}}


def late_buffer(model):
    model["lin"].register_buffer("running_mean", torch.zeros(1))


def pruned(model):
    nn.utils.prune.l1_unstructured(model["lin"], "weight", 0.5)


def begun(model):
    model["lin"].seen = torch.ones(3)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (late_buffer, r"has 'lin\.running_mean', which it did not have"),
        (pruned, r"has 'lin\.weight_mask' and 1 more, which it did not have.*, and lacks 'lin\.w"),
        (begun, None),  # a buffer that was empty is no other name
    ],
)
def test_a_state_dict_with_other_names_than_at_first_is_named_at_the_next_snapshot(
    tmp_path, change, names
):
    """The program that is started again builds the model as it was: it would be refused."""
    model = make_model()
    model["lin"].register_buffer("seen", None)
    run = make(tmp_path, lambda m: torch.optim.SGD(m["emb"].parameters(), 0.1), model=model)
    assert train(run, 1)[0].is_complete
    change(model)
    handle, texts = train(run, 2)
    assert handle.is_complete == (names is None)
    assert len(texts) == (names is not None)
    assert names is None or re.search(names, texts[0])


class Copied(nn.Module):
    """Its state_dict() has a copy of its state."""

    count = 0

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "count"] = torch.tensor(self.count)

    def _load_from_state_dict(self, state_dict, prefix, *_):
        if prefix + "count" in state_dict:
            self.count = int(state_dict[prefix + "count"])


def test_state_that_a_module_shows_as_a_copy_is_loaded_by_the_module(tmp_path):
    first, second = make_model(), make_model()
    first["copied"], second["copied"] = Copied(), Copied()
    run = make(tmp_path, adagrad, model=first)
    first["copied"].count = 42
    train(run)
    resumed(run, tmp_path, adagrad, model=second)
    assert second["copied"].count == 42


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_memory_layout_of_optimizer_state_returns(tmp_path, order):
    class Permuted(torch.optim.SGD):
        def own(self):
            return self.state[self.param_groups[0]["params"][1]]

        def step(self, closure=None):
            self.own().setdefault("basis", torch.arange(12.0).view(3, 4).permute(order))
            super().step()

    def optimizer_of(model):
        return Permuted(model.parameters(), lr=0.1)

    run = make(tmp_path, optimizer_of)
    train(run)
    saved = run.optimizer.own()["basis"]
    basis = resumed(run, tmp_path, optimizer_of)[0].optimizer.own()["basis"]
    assert torch.equal(basis, saved)
    assert basis.stride() == saved.stride()


def sparse_buffer(model):
    model["lin"].register_buffer("graph", torch.eye(3).to_sparse())
    return torch.optim.SGD(model.parameters(), lr=0.1)


def callable_in_group(model):
    return torch.optim.SGD([{"params": model.parameters(), "fn": print}], lr=0.1)


def lazy(model):
    model["lazy"] = nn.LazyLinear(2)
    return torch.optim.SGD(model["lin"].parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("optimizer_of", "match"),
    [
        (sparse_buffer, "lin.graph is a tensor of torch.float32, torch.sparse_coo"),
        (callable_in_group, "groups.0.fn is a builtin_function"),
        (lazy, "'lazy.weight' has no shape yet.*call the model once"),
    ],
)
def test_what_cannot_be_saved_is_named_at_construction(tmp_path, optimizer_of, match):
    with pytest.raises(UsageError, match=match):
        make(tmp_path, optimizer_of)
