"""All that is not a table row, captured and put back bit for bit."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.errors import NanError, StoreError
from cpr_ext.state.dense_schema import pack, unpack
from cpr_ext.state.dense_state import (
    DensePart,
    capture_dense,
    refuse_nan,
    restore_dense,
    restore_optimizers,
    shared_optimizers,
)
from cpr_ext.state.grown_buffers import copy_unsaved_buffers, restore_unsaved_buffers
from cpr_ext.state.table import find_tables
from python_tests.helpers import assert_same, clone, copy_state, differences, same_bits

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=2),
}


class WithState(nn.Module):
    """A module whose state_dict holds more than tensors."""

    def __init__(self):
        super().__init__()
        self.vocabulary = {}

    def get_extra_state(self):
        return dict(self.vocabulary)

    def set_extra_state(self, state):
        self.vocabulary = dict(state)


def make(optimizer="adam", seed=0, width=3):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(4, width), nn.BatchNorm1d(width), nn.PReLU(), nn.Linear(width, 1), WithState()
    )
    model.register_buffer("scalar", torch.tensor(seed + 1.5, dtype=torch.float64))
    model.register_buffer("nothing", torch.empty(0, 3))
    return model, OPTIMIZERS[optimizer](model.parameters())


def step(model, optimizer, seed):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))

    def closure():
        optimizer.zero_grad()
        loss = model[3](model[2](model[1](model[0](x)))).square().mean() + 0 * torch.rand(())
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("target", ["fresh", "live"])
def test_everything_comes_back_bit_for_bit_and_the_next_steps_are_the_same(name, target):
    model, optimizer = make(name)
    for seed in range(3):
        step(model, optimizer, seed)
    model[4].vocabulary = {"word": 3}
    part = capture_dense(model, [optimizer], [], {"extra": 1})
    before = clone(copy_state(model, [optimizer]))
    step(model, optimizer, 3)
    after = copy_state(model, [optimizer])
    if target == "fresh":
        model, optimizer = make(name, seed=7)
    random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
    assert restore_dense(part, model, [optimizer], []) == {"extra": 1}
    assert_same(copy_state(model, [optimizer]), before)
    assert model[4].vocabulary == {"word": 3}
    step(model, optimizer, 3)
    assert_same(copy_state(model, [optimizer]), after)


def test_going_back_is_to_a_copy_in_the_same_memory_and_drops_state_made_since():
    model, optimizer = make("sgd_momentum")
    part = capture_dense(model, [optimizer], [], None)
    before = copy_state(model, [optimizer])
    tensors = {name: tensor.clone() for name, tensor in part.tensors.items()}
    step(model, optimizer, 0)
    assert_same(dict(part.tensors), tensors)
    # Others hold references to the memory: compiled graphs, optimizers, the caller.
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    restore_dense(part, model, [optimizer], [])
    assert_same(copy_state(model, [optimizer]), before)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def test_table_rows_and_their_states_are_not_in_the_dense_part():
    table = nn.Embedding(50, 3)
    model = nn.Sequential(table, nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    tables = find_tables(model, [optimizer])
    part = capture_dense(model, [optimizer], tables, None)
    assert not [name for name in part.tensors if part.tensors[name].shape[:1] == (50,)]
    state = copy_state(model, [optimizer])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    restore_dense(part, model, [optimizer], tables)
    assert differences(copy_state(model, [optimizer]), state) == ["/model/0.weight"]


@pytest.mark.parametrize("option", [None, "fused", "capturable"])
def test_step_counters_go_where_the_optimizer_reads_them_as_torch_itself_loads_them(option):
    """In a new process there is no state yet; the device ``meta`` stands for a GPU."""
    source = nn.Linear(4, 3)
    trained = torch.optim.NAdam(source.parameters(), lr=torch.tensor(0.1), foreach=False)
    source(torch.ones(2, 4)).sum().backward()
    trained.step()
    for group in trained.param_groups:
        group.update(dict.fromkeys(("fused", "capturable"), False))
        if option is not None:
            group[option] = True
    tree = {
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in trained.param_groups],
        "states": {str(i): dict(trained.state[p]) for i, p in enumerate(source.parameters())},
    }
    model = nn.Linear(4, 3, device="meta")
    optimizer = torch.optim.NAdam(model.parameters())
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    restore_optimizers([tree], [optimizer], [], model.state_dict(keep_vars=True))
    expected = torch.optim.NAdam(model.parameters())
    expected.load_state_dict(trained.state_dict())
    for parameter in model.parameters():
        restored, loaded = optimizer.state[parameter], expected.state[parameter]
        assert {k: v.device for k, v in restored.items()} == {
            k: v.device for k, v in loaded.items()
        }
        assert restored["step"].device.type == ("cpu" if option is None else "meta")
    assert optimizer.param_groups[0]["lr"].device.type == "meta"


def parameter():
    return nn.Parameter(torch.ones(2))


def two_groups(rate):
    return torch.optim.SGD([{"params": parameter()}, {"params": parameter()}], lr=rate)


@pytest.mark.parametrize(
    "make",
    [
        lambda rate: torch.optim.SGD([parameter()], lr=rate),
        lambda rate: torch.optim.SGD([{"params": parameter(), "x": (rate,)}]),
        two_groups,
    ],
)
def test_a_setting_goes_into_the_tensor_that_the_loop_holds(make):
    """As in ``rate = torch.tensor(0.1)``, ``SGD(p, lr=rate)``, then ``rate.mul_(0.9)``."""
    saved, live = torch.tensor(0.05), torch.tensor(0.1)
    part = capture_dense(nn.Module(), [make(saved)], [], None)
    optimizer = make(live)
    restore_dense(part, nn.Module(), [optimizer], [])
    live.mul_(2)
    for group in optimizer.param_groups:
        assert group.get("x", [group["lr"]])[0] == live == 0.1


def test_groups_that_share_a_tensor_get_the_values_that_each_had():
    source = two_groups(torch.tensor(0.1))
    source.param_groups[1]["lr"] = torch.tensor(0.2)
    part = capture_dense(nn.Module(), [source], [], None)
    target = two_groups(torch.tensor(0.3))
    restore_dense(part, nn.Module(), [target], [])
    assert [group["lr"] for group in target.param_groups] == [torch.tensor(0.1), torch.tensor(0.2)]


def test_an_unsaved_buffer_of_a_worker_keeps_its_memory():
    model = nn.Module()
    model.register_buffer("seen", torch.tensor([3]), persistent=False)
    skeleton, tensors = copy_unsaved_buffers(model, [])
    held = model.seen
    held.fill_(5)
    restore_unsaved_buffers(unpack(skeleton, tensors), model, [])
    assert model.seen is held
    assert held == 3


BITS = [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_numbers_of_any_dtype_come_back_in_every_bit(dtype):
    def make(values):
        model = nn.Module()
        model.register_buffer("rotary", values.to(dtype).T)
        model.scale = nn.Parameter(values[0, 0].to(dtype), requires_grad=False)
        return model

    values = torch.randn(3, 4, dtype=torch.float64)
    source, target = make(values), make(torch.zeros(3, 4, dtype=torch.float64))
    part = DensePart(*pack(capture_dense(source, [], [], None).tree(), "dense"))
    restore_dense(part, target, [], [])
    for left, right in zip(target.state_dict().values(), source.state_dict().values(), strict=True):
        assert same_bits(left, right)
        assert left.stride() == right.stride()


def one_layer_less():
    model = nn.Sequential(nn.Linear(4, 3))
    return model, torch.optim.Adam(model.parameters())


def more_groups():
    model, _ = make()
    parameters = list(model.parameters())
    return model, torch.optim.Adam([{"params": parameters[:2]}, {"params": parameters[2:]}])


def another_dtype():
    model = make()[0].double()
    return model, torch.optim.Adam(model.parameters(), amsgrad=True)


@pytest.mark.parametrize(
    ("saved", "other", "told"),
    [
        (make, lambda: make(width=4), r"parameter '0.bias' has dtype torch.float32 and shape \(3,"),
        (make, one_layer_less, "parameter '1.bias' is not in the model"),
        (one_layer_less, make, r"parameter '1\.bias' is not in the store"),
        (make, lambda: make("adagrad"), r"\[\('Adam', 1, 7\)\], the run has \[\('Adagrad'"),
        (make, more_groups, r"\('Adam', 1, 7\).*\('Adam', 2, 7\)"),
        (make, another_dtype, "parameter '0.bias' has dtype torch.float32 .* torch.float64"),
    ],
)
def test_another_model_or_optimizer_is_refused_and_nothing_changes(saved, other, told):
    model, optimizer = saved()
    part = capture_dense(model, [optimizer], [], None)
    model, optimizer = other()
    before = copy_state(model, [optimizer])
    with pytest.raises(StoreError, match=told):
        restore_dense(part, model, [optimizer], [])
    assert_same(copy_state(model, [optimizer]), before)


def test_nan_in_a_parameter_is_refused_and_elsewhere_it_is_not():
    refuse_nan(DensePart(None, {"dense.extra.x": torch.tensor(float("nan"))}))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.zeros(3, 3, dtype=dtype)
        refuse_nan(DensePart(None, {"dense.model.w": tensor}))
        tensor[2, 2] = float("nan")
        with pytest.raises(NanError, match="parameter 'w' holds NaN"):
            refuse_nan(DensePart(None, {"dense.model.w": tensor}))


def make_twins(*groups):
    """A table, two layers of one shape, and Adam over groups of them in an order of choice."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"emb": nn.Embedding(9, 4), "a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    settings = [
        {"params": [p for name in group for p in model[name].parameters()], "lr": 0.1 / (1 + n)}
        for n, group in enumerate(groups)
    ]
    return model, torch.optim.Adam(settings)


@pytest.fixture
def twins(tmp_path):
    """A store, and the model and optimizer that it is of."""
    model, optimizer = make_twins("ab", ["emb"])
    with cpr_ext.Checkpointer(model, optimizer, tmp_path) as ckpt:
        for _ in range(2):
            optimizer.zero_grad()
            model["b"](model["a"](model["emb"](torch.arange(3))).tanh()).square().sum().backward()
            optimizer.step()
            ckpt.step()
    return tmp_path, model, optimizer


def test_states_belong_to_parameters_and_not_to_places_in_an_optimizer(twins):
    directory, saved, saved_optimizer = twins
    model, optimizer = make_twins("ba", ["emb"])
    with cpr_ext.Checkpointer(model, optimizer, directory) as ckpt:
        ckpt.recover()
    for own, other in zip(saved.parameters(), model.parameters(), strict=True):
        assert_same(optimizer.state[other], saved_optimizer.state[own])
    for groups in ((["emb"], "ab"), ("a", ["b", "emb"])):
        with (
            cpr_ext.Checkpointer(*make_twins(*groups), directory) as ckpt,
            pytest.raises(StoreError, match=r"a Adam has its parameters in groups \[\['"),
        ):
            ckpt.recover()


def test_an_optimizer_of_tables_alone_is_not_shared_between_workers():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))
    of_rows, of_both = (torch.optim.SGD(of.parameters(), lr=0.1) for of in (model[0], model))
    tables = find_tables(model, [of_both])
    assert shared_optimizers([of_rows, of_both], tables) == [of_both]
    assert shared_optimizers([of_rows], []) == [of_rows]
