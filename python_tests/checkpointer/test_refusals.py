"""Options and calls that are refused by value and remedy, and what they leave behind; warnings."""

import copy
import inspect
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import cpr_ext
import cpr_ext.tracking.unwatched
from cpr_ext import Checkpointer, EverySteps, StagingOptions, StoreOptions
from cpr_ext.distributed.parity.options import Parity
from cpr_ext.errors import CprError, StorageError, UntrackedChangeWarning, UsageError
from cpr_ext.wings.remote.opening import RemoteOptions
from python_tests.helpers import Trained


def small():
    model = nn.Sequential(nn.EmbeddingBag(50, 4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Wrapped(torch.optim.Optimizer):
    """Looks like an optimizer, but only passes steps on."""

    def __init__(self, optimizer, **own):
        self.optimizer = optimizer
        self.__dict__ |= own


def given(**options):
    return lambda m, o, d: Checkpointer(m, o, d, **options)


MISTAKES = [
    (lambda m, o, d: Checkpointer(m, d, d), "needed: the torch optimizer"),
    (lambda m, o, d: Checkpointer(m, None, d), "NoneType; needed: the torch optimizer"),
    (lambda m, o, d: Checkpointer(m, m.parameters(), d), "a Parameter; needed: the torch optimiz"),
    (lambda m, o, d: Checkpointer(m, [o, 3], d), "optimizers is or holds a int"),
    (lambda m, o, d: Checkpointer(m, Wrapped(Wrapped(None)), d), "a Wrapped cannot be watched"),
    (
        lambda m, o, d: Checkpointer(m, Wrapped(o, state={}), d),
        "give the SGD inside of it, and the Wrapped itself",
    ),
    (lambda m, o, d: Checkpointer(m, small()[1], d), "a SGD updates no parameter of this model"),
    (
        lambda m, o, d: Checkpointer(m, [o, torch.optim.SGD(m.parameters())], d),
        "updated by two optimizers",
    ),
    (lambda m, o, d: Checkpointer(o, m, d), "model is an optimizer; the model comes first"),
    (lambda m, o, d: Checkpointer(nn.Linear(2, 2), [], d), r'tables=\{"name": parameter\}'),
    (lambda m, o, d: Checkpointer(m, o, ""), r"directory is ''; needed: a path \('.' is the wor"),
    (given(schedule=500), "schedule is 500; needed: such as EverySteps"),
    (given(priority="mfu"), "priority is 'mfu'; needed: such as MostFrequentlyUsed"),
    (given(priority=cpr_ext.AllRows), "priority is"),
    (given(num_shards=1.5), "num_shards is 1.5"),
    (given(num_shards=0), "num_shards is 0; it must be at least 1"),
    (given(num_shards=-3), "num_shards is -3"),
    (given(num_shards=100_000), "num_shards is 100000; it must be at most 4096"),
    (given(store={"rebase_after": 3}), r"needed: such as StoreOptions\(rebase_after=2.0\)"),
    (given(staging={"num_slots": 3}), r"needed: such as StagingOptions\(num_slots=3\)"),
    (given(staging=StagingOptions(slot_bytes=8)), r"'0': rows of 4 columns.*at least 8192"),
    (
        given(priority=cpr_ext.LargestChange(), store=StoreOptions(on_nan="save")),
        'LargestChange cannot rank NaN rows; use on_nan="raise"',
    ),
    (given(tables={}), "no nn.Embedding"),
    (given(tables={"x": 3}), "'x' is a int"),
    (given(tables={"a": "0.weight"}), "is a str"),
    (lambda m, o, d: Checkpointer(m, o, d, tables=[m[0]]), "EmbeddingBag"),
    (lambda m, o, d: Checkpointer(m, o, d, state=[o]), "state is a list; needed"),
    (given(on_sigterm="exit"), "on_sigterm is 'exit'; allowed: \"save\", None"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_a_mistake_is_named_with_its_remedy_and_nothing_is_left_behind(tmp_path, mistake, message):
    model, optimizer = small()
    with pytest.raises(UsageError, match=message):
        mistake(model, optimizer, tmp_path / "store")
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not (tmp_path / "store").exists()


VALUES = [
    (lambda: StagingOptions(num_slots=1), "num_slots is 1; it must be at least 2"),
    (lambda: StagingOptions(slot_bytes=0), "slot_bytes is 0; it must be at least 1, or None"),
    (lambda: StagingOptions(slot_bytes=-4096), "slot_bytes is -4096"),
    (lambda: StagingOptions(num_threads=0), "num_threads is 0; it must be at least 1, or None"),
    (lambda: StagingOptions(num_threads=1.5), "num_threads is 1.5; needed: a whole number"),
    (lambda: StoreOptions(rebase_after=0), "rebase_after is 0; it must be positive, or None"),
    (lambda: StoreOptions(rebase_after=float("nan")), "rebase_after is nan"),
    (lambda: StoreOptions(rebase_after=True), "rebase_after is True; needed: a number"),
    (lambda: StoreOptions(on_nan="ignore"), "on_nan is 'ignore'; allowed: raise, save"),
    (lambda: StoreOptions(precision="int8"), "precision is 'int8'; needed: such as Precision"),
    (lambda: EverySteps(5, when_busy="skip"), "when_busy is 'skip'; allowed: delay, wait"),
]


@pytest.mark.parametrize(("make", "message"), VALUES)
def test_a_value_out_of_range_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


CALLS = [
    (lambda c: c.recover(shards=1), "shards is 1; needed: a list"),
    (lambda c: c.recover(shards=[7]), "shard 7 does not exist"),
    (lambda c: c.recover(shards=[-1]), "shard -1 does not exist; there are 0 to 1"),
    (lambda c: c.recover(mode="half"), "mode is 'half'; allowed: partial, full"),
    (lambda c: c.save(kind="full"), "kind is 'full'; allowed: partial, base"),
    (lambda c: c.writing_rows("emb", torch.tensor([1])).__enter__(), "no table 'emb'; there"),
    *((lambda c, n=n: c.step(n), "num_samples") for n in ("x", -1, 1.5, None)),
    (lambda c: c.step(torch.tensor([1, 2])), "num_samples"),
]


def test_a_mistake_in_a_call_is_named_and_changes_nothing(tmp_path):
    model, optimizer = small()
    with Checkpointer(model, optimizer, tmp_path, num_shards=2.0) as checkpointer:
        for samples in (torch.tensor(8), np.int64(8), np.uint8(8), 8.0, 8, torch.tensor([8])):
            checkpointer.step(samples)
        for mistake, message in CALLS:
            with pytest.raises(UsageError, match=message):
                mistake(checkpointer)
        assert (checkpointer.step_count, checkpointer.num_samples) == (6, 48)
        assert checkpointer.recover(shards=[1, np.int32(0), 1]).shards == (0, 1)
    checkpointer.close()
    for call in (checkpointer.step, checkpointer.save, checkpointer.wait, checkpointer.recover):
        with pytest.raises(UsageError, match="the Checkpointer is closed"):
            call()


def test_a_place_that_cannot_be_a_store_is_told_with_its_path(tmp_path):
    (tmp_path / "file").write_text("")
    model, optimizer = small()
    for place, told in (
        ("file/store", "file/store"),
        ("file", r"file.: .*\. It is no directory; choose another"),
    ):
        with pytest.raises(StorageError, match=told):
            Checkpointer(model, optimizer, tmp_path / place)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_slots_are_as_large_as_the_oddest_rows_need(tmp_path, optimizer):
    run = Trained(tmp_path, {"a": (1500, 1025)}, optimizer=optimizer)
    run.train(2)
    assert run.save("base").state == "committed"


def own_warnings(caught):
    return [str(each.message) for each in caught if each.category is UntrackedChangeWarning]


def test_a_large_parameter_that_is_no_table_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(cpr_ext.tracking.unwatched, "_LARGE_BYTES", 1000)
    model = nn.Sequential(nn.Embedding(500, 4), nn.Linear(4, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UntrackedChangeWarning, match=r"ter '1\.weight' .* is no table") as each:
        Checkpointer(model, optimizer, tmp_path).close()
    assert each[0].filename == __file__  # the line that made it


def test_sparse_gradients_of_a_parameter_that_is_no_table_are_warned_of_once(tmp_path):
    model = nn.ModuleList([nn.Embedding(50, 4, sparse=True) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        Checkpointer(model, optimizer, tmp_path, tables={"a": model[0]}) as checkpointer,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            sum(table(torch.tensor([1])).sum() for table in model).backward()
            optimizer.step()
            checkpointer.step()
    (message,) = own_warnings(caught)
    assert "'1.weight' has sparse gradients but is no table" in message


# --- every option, with values of every kind ---


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
