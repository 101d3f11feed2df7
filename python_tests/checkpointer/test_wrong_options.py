"""An option of a wrong type or value is refused where it is given, by its name, never later."""

import copy
import inspect
import math
import pickle

import pytest
import torch

import cpr_ext
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
    assert taken <= allowed


def test_a_model_and_an_optimizer_in_each_others_place_are_named(tmp_path):
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8, sparse=True))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with pytest.raises(CprError, match="model is an optimizer; the model comes first"):
        cpr_ext.Checkpointer(optimizer, model, tmp_path)


def made(directory, **options):
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8, sparse=True))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return cpr_ext.Checkpointer(model, optimizer, directory, **options)


def test_a_place_that_can_be_no_store_is_named_with_the_remedy(tmp_path):
    with pytest.raises(CprError, match=r"directory is ''; needed: a path \('.' is the working dir"):
        made("")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CprError, match=r"file.: .*\. It is no directory; choose another"):
        made(tmp_path / "file")


def test_more_shards_than_files_can_be_open_are_refused_before_the_first_is_made(tmp_path):
    with pytest.raises(CprError, match="num_shards is 100000; it must be at most 4096"):
        made(tmp_path / "store", num_shards=100_000)
    assert not (tmp_path / "store").exists()


def test_other_optimizers_are_refused_with_the_ways_that_work(tmp_path):
    made(tmp_path / "store").close()  # nothing trained
    with made(tmp_path / "store") as checkpointer:
        checkpointer.recover()
        checkpointer.save("base")
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8, sparse=True))
    with cpr_ext.Checkpointer(model, [], tmp_path / "store") as checkpointer:
        with pytest.raises(CprError, match=r"store holds optimizers .*cpr_ext\.load_into"):
            checkpointer.recover()
    with pytest.raises(CprError, match=r"holds a NoneType; .*cpr_ext\.load_into"):
        cpr_ext.Checkpointer(model, None, tmp_path / "other")


def test_a_checkpointer_shows_where_it_is_and_is_not_copied(tmp_path):
    with made(tmp_path / "store") as checkpointer:
        checkpointer.recover()
        place = f"Checkpointer of '{tmp_path / 'store'}': step 0, newest snapshot of step 0"
        assert repr(checkpointer) == f"<{place}, 1 tables of 100 rows>"
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="has a store open"):
                copied(checkpointer)
