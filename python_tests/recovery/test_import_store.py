"""A store of one shape, recovered into another."""

import copy
import shutil

import pytest
import torch

import cpr_ext
from cpr_ext.errors import StoreError, UsageError
from python_tests.helpers import Trained, assert_same, same_bits
from python_tests.wings.tools.maintenance.stores import TABLES, recovered, trained_store


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """One run each, cut into 5 and into 8 shards."""
    directory = tmp_path_factory.mktemp("stores")
    for shards in (5, 8):
        trained_store(directory / str(shards), num_shards=shards).checkpointer.close()
    return {shards: directory / str(shards) for shards in (5, 8)}


def contents(store):
    return {p: p.read_bytes() for p in sorted(store.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(("old", "new"), [(8, 5), (5, 8), (8, 1), (5, 5)])
@pytest.mark.parametrize("mode", ["partial", "full"])
def test_any_number_of_shards_recovers_into_any_other_bit_for_bit(stores, tmp_path, old, new, mode):
    shutil.copytree(stores[old], tmp_path / "reference")
    expected = recovered(tmp_path / "reference", num_shards=old, mode=mode)
    before = contents(stores[old])
    trained = Trained(tmp_path / "new", TABLES, num_shards=new, seed=5)
    report = trained.checkpointer.recover(from_store=stores[old], mode=mode)
    assert (report.step, report.num_samples) == (expected[0].step, expected[0].num_samples)
    assert report.rows_restored == sum(rows for rows, _ in TABLES.values())
    assert report.differences == []
    assert_same(trained.rows(), expected[1])
    assert_same(trained.state(), expected[2])
    trained.checkpointer.close()
    assert contents(stores[old]) == before


CHANGES = {
    "added": ({**TABLES, "new": (10, 2)}, ["table 'tables.new' is not in the store"]),
    "removed": ({"big": (700, 4), "mid": (90, 3)}, ["table 'tables.small' is not in the model"]),
    "renamed": (
        {"big": (700, 4), "middle": (90, 3), "small": (3, 2)},
        ["table 'tables.mid' is not in the model", "table 'tables.middle' is not in the store"],
    ),
    "grown": ({**TABLES, "big": (900, 4)}, ["'tables.big' has num_embeddings 700, the model 900"]),
    "shrunk": ({**TABLES, "big": (600, 4)}, ["'tables.big' has num_embeddings 700, the model 600"]),
    "dim": ({**TABLES, "mid": (90, 5)}, ["'tables.mid' has embedding_dim 3, the model 5"]),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_changed_model_is_refused_with_the_list_of_differences_or_takes_what_matches(
    stores, tmp_path, change
):
    tables, sentences = CHANGES[change]
    shutil.copytree(stores[8], tmp_path / "reference")
    expected = recovered(tmp_path / "reference", num_shards=8)[1]
    trained = Trained(tmp_path / "new", tables, num_shards=5)
    before, rows_before = trained.state(), trained.rows()
    with pytest.raises(StoreError) as error:
        trained.checkpointer.recover(from_store=stores[8])
    assert all(sentence in str(error.value) for sentence in sentences)
    assert_same(trained.state(), before)
    report = trained.checkpointer.recover(from_store=stores[8], strict=False)
    assert report.step == 13
    assert all(any(s in difference for difference in report.differences) for s in sentences)
    after = trained.rows()
    for name, (rows, dim) in tables.items():
        old_rows, old_dim = TABLES.get(name, (0, 0))
        key = f"tables.{name}"
        taken = old_rows if dim == old_dim and rows >= old_rows else 0
        if taken:
            for array, values in after[key].items():
                assert same_bits(values[:taken], expected[key][array][:taken])
        assert same_bits(after[key]["weight"][taken:], rows_before[key]["weight"][taken:])
    trained.train(3)
    trained.save()
    trained.checkpointer.close()
    again = Trained(tmp_path / "new", tables, num_shards=5, seed=9)
    assert again.checkpointer.recover().step == 16


def test_options_that_do_not_go_together_are_refused(stores, tmp_path):
    trained = Trained(tmp_path / "new", TABLES)
    with pytest.raises(UsageError, match="leave out"):
        trained.checkpointer.recover(from_store=stores[8], shards=[0])
    with pytest.raises(UsageError, match="needs from_store"):
        trained.checkpointer.recover(strict=False)
    with pytest.raises(StoreError, match="not a cpr_ext store"):
        trained.checkpointer.recover(from_store=tmp_path / "nothing")
    trained.checkpointer.close()


@pytest.mark.parametrize("many", [False, True], ids=["one store", "a list of stores"])
def test_a_store_with_nothing_of_the_model_is_refused_though_not_strict(tmp_path, many):
    def checkpointer(model, name):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return cpr_ext.Checkpointer(model, optimizer, tmp_path / name)

    model = torch.nn.Sequential(torch.nn.EmbeddingBag(10, 4), torch.nn.Linear(4, 1))
    other = torch.nn.ModuleDict({"inner": copy.deepcopy(model)})
    with checkpointer(other, "other") as saved:
        saved.save("base").wait_until_done()
    store = tmp_path / "other"
    with checkpointer(model, "new") as new:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(StoreError, match=r"have nothing in common.*Name a store of this model"):
            new.recover(from_store=[store] if many else store, strict=False)
        assert_same(dict(model.state_dict()), before)
