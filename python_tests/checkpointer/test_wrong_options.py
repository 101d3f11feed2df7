"""An option of a wrong type or value is refused where it is given, by its name, never later."""

import copy
import inspect
import math
import pickle

import pytest
import torch

import cpr_ext
from cpr_ext import StagingOptions
from cpr_ext.distributed.parity.options import Parity
from cpr_ext.errors import CprError
from cpr_ext.wings.remote.opening import RemoteOptions

#: None, numbers and containers that an option does take are among them.
WRONG = {
    "object": object(),
    "text": "no",
    "bytes": b"no",
    "half": 3.5,
    "negative": -1,
    "zero": 0,
    "true": True,
    "nan": math.nan,
    "huge": 2**70,
    "list": [],
    "dict": {},
    "list of objects": [object()],
    "function": print,
    "tensor": torch.tensor([1, 2]),
    "none": None,
}
#: What each class needs, to be made at all.
CLASSES = {
    cpr_ext.StagingOptions: {},
    cpr_ext.StoreOptions: {},
    cpr_ext.Retention: {},
    cpr_ext.Precision: {},
    cpr_ext.MostFrequentlyUsed: {},
    cpr_ext.SubSampledUsed: {},
    cpr_ext.LargestChange: {},
    cpr_ext.AllRows: {},
    cpr_ext.EverySteps: {"steps": 5},
    cpr_ext.EverySeconds: {"seconds": 5},
    cpr_ext.Continuous: {},
    RemoteOptions: {"address": "s3://bucket/job"},
    Parity: {},
}
CASES = [(kind, name) for kind in CLASSES for name in inspect.signature(kind).parameters]
#: Options that are only said yes or no to: nothing but a flag is taken.
FLAGS = ("direct_io", "release_when_full")


def is_taken(make):
    try:
        make()
    except CprError:
        return False
    return True


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{k.__name__}-{n}" for k, n in CASES])
def test_a_part_of_the_options_takes_a_value_or_refuses_it(kind, name):
    taken = {
        what
        for what, value in WRONG.items()
        if is_taken(lambda value=value: kind(**{**CLASSES[kind], name: value}))
    }
    assert not taken & {"object", "bytes", "list of objects", "tensor", "nan"}
    assert name not in FLAGS or taken == {"true"}


def made(directory, /, **options):
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8, sparse=True))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    given = {"model": model, "optimizers": optimizer, "directory": directory}
    return cpr_ext.Checkpointer(**{**given, **options})


OPTIONS = [
    *("model", "optimizers", "directory", "priority", "schedule", "num_shards", "tables"),
    *("state", "store", "staging", "on_sigterm"),
]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_checkpointer_takes_a_value_or_refuses_it(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)  # "no" is a directory

    def use(number, value):
        with made(tmp_path / str(number), **{name: value}) as checkpointer:
            checkpointer.recover()
            checkpointer.model(torch.tensor([[1, 2]])).sum().backward()
            for optimizer in checkpointer.optimizers:
                optimizer.step()
            checkpointer.step()

    taken = {
        what
        for number, (what, value) in enumerate(WRONG.items())
        if is_taken(lambda number=number, value=value: use(number, value))
    }
    assert taken <= {"none", "list", "dict", "text", "true"}


def test_the_door_has_eleven_options(tmp_path):
    assert [*inspect.signature(cpr_ext.Checkpointer).parameters] == OPTIONS
    with pytest.raises(TypeError, match="unexpected keyword argument 'slotbytes'"):
        made(tmp_path, slotbytes=3)
    assert StagingOptions(num_slots=4.0, slot_bytes=8192.0) == StagingOptions(8192, 4)
    with pytest.raises(AttributeError):
        StagingOptions().num_slots = 5


def test_other_optimizers_are_refused_with_the_ways_that_work(tmp_path):
    made(tmp_path / "store").close()  # nothing trained
    with made(tmp_path / "store") as checkpointer:
        checkpointer.recover()
        checkpointer.save("base")
    with made(tmp_path / "store", optimizers=[]) as checkpointer:
        with pytest.raises(CprError, match=r"store holds optimizers .*cpr_ext\.load_into"):
            checkpointer.recover()
    with pytest.raises(CprError, match=r"holds a NoneType; .*cpr_ext\.load_into"):
        made(tmp_path / "other", optimizers=None)


def test_a_checkpointer_shows_where_it_is_and_is_not_copied(tmp_path):
    with made(tmp_path / "store") as checkpointer:
        checkpointer.recover()
        place = f"Checkpointer of '{tmp_path / 'store'}': step 0, newest snapshot of step 0"
        assert repr(checkpointer) == f"<{place}, 1 tables of 100 rows>"
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="has a store open"):
                copied(checkpointer)
