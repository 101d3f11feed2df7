"""An option of a wrong type or value is refused where it is given, by its name, never later."""

import inspect
import math

import pytest
import torch

import cpr_ext
from cpr_ext.distributed.parity.options import Parity
from cpr_ext.errors import CprError
from cpr_ext.storage.remote.objects import RemoteOptions

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
    cpr_ext.CompactionOptions: {},
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
FLAGS = ("save_at_close", "count_row_updates", "direct_io", "release_when_full")


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


OPTIONS = list(inspect.signature(cpr_ext.Checkpointer).parameters)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_checkpointer_takes_a_value_or_refuses_it(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)  # "no" is a directory

    def use(number, value):
        model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8, sparse=True))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        options = {"model": model, "optimizers": optimizer, "directory": tmp_path / str(number)}
        with cpr_ext.Checkpointer(**{**options, name: value}) as checkpointer:
            checkpointer.recover()
            model(torch.tensor([[1, 2]])).sum().backward()
            optimizer.step()
            checkpointer.step()

    taken = {
        what
        for number, (what, value) in enumerate(WRONG.items())
        if is_taken(lambda number=number, value=value: use(number, value))
    }
    allowed = {"none", "list", "dict", "text", "true"}
    if name == "rebase_after":
        allowed |= {"half", "huge"}
    if name == "extra_state":
        allowed |= {"function"}
    assert taken <= allowed
    assert name not in FLAGS or taken == {"true"}


def test_a_model_and_an_optimizer_in_each_others_place_are_named(tmp_path):
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8, sparse=True))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with pytest.raises(CprError, match="model is an optimizer; the model comes first"):
        cpr_ext.Checkpointer(optimizer, model, tmp_path)
