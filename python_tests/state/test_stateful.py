"""Objects of ``state=``: which are taken, and how their states return."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from cpr_ext.errors import DamageError, StoreError, UsageError
from cpr_ext.state.dense_state import capture_dense, own_part, restore_dense
from cpr_ext.state.stateful import Declared, PerRank, as_declared

SCHEDULERS = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [2, 4])], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


class Counted:
    def __init__(self, state=None):
        self.state = {"counts": torch.arange(3)} if state is None else state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


SAME = Counted()


def optimizer_of_one():
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)


def declared(objects):
    return Declared({f"o{number}": each for number, each in enumerate(objects)})


def captured(objects, optimizers=()):
    return capture_dense(nn.Linear(2, 1), list(optimizers), [], None, declared(objects))


def restored(part, objects, optimizers=(), **options):
    given = declared(objects)
    restore_dense(part, nn.Linear(2, 1), list(optimizers), [], declared=given, **options)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_each_scheduler_of_torch_continues_where_it_was(name):
    optimizers = [optimizer_of_one(), optimizer_of_one()]
    one, other = [SCHEDULERS[name](optimizer) for optimizer in optimizers]
    metric = [3.0] if name == "ReduceLROnPlateau" else []
    for _ in range(2):
        one.step(*metric)
    restored(captured([one], optimizers[:1]), [other], optimizers[1:])
    for _ in range(4):
        assert other.get_last_lr() == one.get_last_lr()
        assert optimizers[1].param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"]
        one.step(*metric)
        other.step(*metric)
    assert getattr(other, "best", None) == getattr(one, "best", None)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (torch.Generator, lambda g: torch.rand(3, generator=g).tolist()),
        (random.Random, lambda g: [g.random(), g.gauss()]),
        (np.random.default_rng, lambda g: g.random(3).tolist()),
        (lambda: np.random.Generator(np.random.MT19937()), lambda g: g.random(3).tolist()),
        (np.random.RandomState, lambda g: g.standard_normal(3).tolist()),
    ],
)
def test_a_random_number_generator_of_ones_own_goes_on(make, draw):
    one, other = make(), make()
    draw(one)
    objects = [as_declared({"it": each}).objects["it"] for each in (one, other)]
    restored(captured(objects[:1]), objects[1:])
    assert draw(other) == draw(one)


def test_what_an_object_holds_is_its_own_copy():
    one, other = Counted(), Counted()
    part = captured([one])
    one.state["counts"].fill_(9)
    restored(part, [other])
    other.state["counts"].fill_(7)
    third = Counted()
    restored(part, [third])
    assert third.state["counts"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([Counted()], "state is a list; needed: names, such as"),
        ({3: Counted()}, "state= has the name 3"),
        ({"": Counted()}, "state= has the name ''"),
        ({"a": 3}, r"state\['a'\] is a int without state_dict\(\).*or a callable"),
        ({"a": PerRank("b")}, r"state\['a'\] is a str without"),
        ({"b": Counted({"a": {1}})}, r"state\['b'\]\.a is a set; allowed: "),
        ({"a": SAME, "b": PerRank(SAME)}, r"state\['b'\] and state\['a'\] are the same Counted"),
        ({"a": print, "b": print}, r"state\['b'\] and state\['a'\] are the same builtin"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(given, message):
    with pytest.raises(UsageError, match=message):
        as_declared(given)


def test_objects_and_callables_are_told_apart():
    one = Counted()
    assert as_declared(None) == as_declared({}) == Declared()
    given = as_declared({"one": one, "two": PerRank(print)})
    assert given == Declared({"one": one}, {"two": print}, frozenset({"two"}))


def test_other_objects_are_refused_and_nothing_is_loaded():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    other = Counted({"mine": 1})
    part = captured([Counted(), scaler])
    for objects in ([other], [scaler, other], []):
        with pytest.raises(StoreError, match=r"state of .*'o0': 'Counted', 'o1': 'GradScaler'"):
            restored(part, objects)
    restored(part, [scaler, other], strict=False)
    assert other.state == {"mine": 1}
    part = captured([torch.amp.GradScaler("cpu", enabled=False)])
    with pytest.raises(StoreError, match=r"state\['o0'\] \(a GradScaler\) refused the state"):
        restored(part, [torch.amp.GradScaler("cpu")])


@pytest.mark.parametrize("wrong", [[], {"a": 3}, {"a": {"type": 3, "state": 1}}])
def test_a_damaged_mapping_of_states_is_no_dense_part_and_a_workers_own_part_has_none(wrong):
    part = captured([Counted()])
    own = own_part(part, nn.Linear(2, 1), [], [])
    assert "state" not in own.skeleton
    assert not any("dense.state" in name for name in own.tensors)
    part.skeleton["state"] = wrong
    with pytest.raises(DamageError, match="not the dense part"):
        part.tree()
