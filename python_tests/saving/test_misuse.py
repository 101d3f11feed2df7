"""Mistakes of users: refused or warned of."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import cpr_ext
import cpr_ext.tracking.unwatched
from cpr_ext.errors import UntrackedChangeWarning, UsageError


@pytest.mark.parametrize(
    "samples", [torch.tensor(8), np.int64(8), np.uint8(8), 8.0, 8, torch.tensor([8])]
)
def test_the_number_of_samples_is_any_whole_number(run, samples):
    before = run.checkpointer.num_samples
    run.checkpointer.step(samples)
    run.checkpointer.save()
    run.checkpointer.wait()
    assert run.newest().num_samples == before + 8


@pytest.mark.parametrize("samples", ["x", -1, 1.5, None, torch.tensor([1, 2])])
def test_another_number_of_samples_is_refused_and_the_step_not_counted(run, samples):
    with pytest.raises(UsageError, match="num_samples"):
        run.checkpointer.step(samples)
    assert run.checkpointer.step_count == 3


def small():
    model = nn.Sequential(nn.EmbeddingBag(50, 4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda m, o, d: cpr_ext.Checkpointer(m, d, d), "needed: the torch optimizer"),
        (lambda m, o, d: cpr_ext.Checkpointer(m, None, d), "NoneType; needed: the torch optimizer"),
        (
            lambda m, o, d: cpr_ext.Checkpointer(m, m.parameters(), d),
            "a Parameter; needed: the torch optimizer",
        ),
        (
            lambda m, o, d: cpr_ext.Checkpointer(m, small()[1], d),
            "a SGD updates no parameter of this model",
        ),
        (
            lambda m, o, d: cpr_ext.Checkpointer(m, [o, torch.optim.SGD(m.parameters())], d),
            "updated by two optimizers",
        ),
        (lambda m, o, d: cpr_ext.MostFrequentlyUsed(12.5), "fraction is 12.5"),
        (lambda m, o, d: cpr_ext.Checkpointer(m, o, d, schedule=500), "schedule is 500"),
        (lambda m, o, d: cpr_ext.Checkpointer(m, o, d, priority=cpr_ext.AllRows), "priority is"),
        (lambda m, o, d: cpr_ext.Checkpointer(m, o, d, num_shards=1.5), "num_shards is 1.5"),
        (
            lambda m, o, d: cpr_ext.Checkpointer(
                m, o, d, staging=cpr_ext.StagingOptions(slot_bytes=1000)
            ),
            "at least",
        ),
        (lambda m, o, d: cpr_ext.Checkpointer(m, o, d, tables={"a": "0.weight"}), "is a str"),
        (lambda m, o, d: cpr_ext.Checkpointer(m, o, d, tables=[m[0]]), "EmbeddingBag"),
        (lambda m, o, d: cpr_ext.Checkpointer(m, o, d, state=[o]), "state is a list; needed"),
    ],
)
def test_a_typical_mistake_is_named_with_its_remedy(tmp_path, mistake, message):
    with pytest.raises(UsageError, match=message):
        mistake(*small(), tmp_path / "store")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda c: c.recover(shards=1), "shards is 1; needed: a list"),
        (lambda c: c.recover(shards=[7]), "shard 7 does not exist"),
        (lambda c: c.save(kind="full"), "kind is 'full'; allowed: partial, base"),
        (lambda c: c.record_lookups("emb", torch.tensor([1])), "no table 'emb'; there are: 0"),
    ],
)
def test_a_typical_mistake_in_a_call_is_named_with_its_remedy(tmp_path, mistake, message):
    model, optimizer = small()
    with cpr_ext.Checkpointer(model, optimizer, tmp_path, num_shards=2.0) as checkpointer:
        with pytest.raises(UsageError, match=message):
            mistake(checkpointer)


def own_warnings(caught):
    return [str(each.message) for each in caught if each.category is UntrackedChangeWarning]


def test_a_large_parameter_that_is_no_table_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(cpr_ext.tracking.unwatched, "_LARGE_BYTES", 1000)
    model = nn.Sequential(nn.Embedding(500, 4), nn.Linear(4, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(
        UntrackedChangeWarning, match=r"parameter '1\.weight' .* is no table"
    ) as each:
        cpr_ext.Checkpointer(model, optimizer, tmp_path).close()
    assert each[0].filename == __file__  # the line that made it


def test_sparse_gradients_of_a_parameter_that_is_no_table_are_warned_of_once(tmp_path):
    model = nn.ModuleList([nn.Embedding(50, 4, sparse=True) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cpr_ext.Checkpointer(model, optimizer, tmp_path, tables={"a": model[0]}) as checkpointer:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                sum(table(torch.tensor([1])).sum() for table in model).backward()
                optimizer.step()
                checkpointer.step()
        (message,) = own_warnings(caught)
        assert "'1.weight' has sparse gradients but is no table" in message


@pytest.mark.parametrize("saves_it", [True, False])
def test_a_scheduler_whose_position_is_not_saved_is_warned_of_once(tmp_path, saves_it):
    model, optimizer = small()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"mine": scheduler.state_dict} if saves_it else None
    with (
        cpr_ext.Checkpointer(model, optimizer, tmp_path, state=state) as checkpointer,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        checkpointer.step()
        checkpointer.step()
    found = own_warnings(caught)
    assert len(found) == (not saves_it)
    assert saves_it or "a learning-rate scheduler drives SGD" in found[0]
    assert saves_it or 'state={"scheduler": scheduler}' in found[0]
