"""Names with and without what wrappers add, and models recovered across that difference."""

import copy

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.errors import StoreError
from cpr_ext.state.wrapper_names import added, match_names, plain_names
from python_tests.helpers import assert_same


class Gate(nn.Module):
    """A user's own module that calls its only child ``module``."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_names_match_across_wrappers_where_there_is_one_match_only():
    names = ["_orig_mod.w", "w", "_orig_mod.v"]  # those that would become the same stay
    assert list(plain_names(names, None).values()) == ["_orig_mod.w", "w", "v"]
    assert added(plain_names(["module.a", "module._orig_mod.b"])) == ["module.", "_orig_mod."]
    assert added(plain_names(["a.module.b", "c"])) == []
    found = match_names(["module.a", "b"], ["a", "_orig_mod.b"])
    assert found == {"module.a": "a", "b": "_orig_mod.b"}
    found = match_names(["a", "module.a"], ["a", "_orig_mod.a"])
    assert found == {"a": "a", "module.a": "_orig_mod.a"}
    assert match_names(["module.a", "_orig_mod.a"], ["a"]) == match_names(["x"], ["y"]) == {}


def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.EmbeddingBag(30, 4), Gate(nn.Linear(4, 2)), nn.BatchNorm1d(2))


WRAPPED = {
    "data parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "both": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
    "inside": lambda model: nn.Sequential(model[0], nn.DataParallel(model[1]), model[2]),
    "of TorchRec": lambda model: nn.ModuleDict({"_dmp_wrapped_module": model}),
}


def checkpointer(model, directory):
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return cpr_ext.Checkpointer(model, optimizer, directory, num_shards=2)


@pytest.mark.parametrize("many", [False, True], ids=["one store", "a list of stores"])
@pytest.mark.parametrize("wrapper", sorted(WRAPPED))
@pytest.mark.parametrize("to_plain", [True, False], ids=["to plain", "to wrapped"])
def test_a_model_is_recovered_from_a_store_of_it_wrapped_otherwise(
    tmp_path, wrapper, many, to_plain
):
    old, new = make(1), make(2)
    wrap = WRAPPED[wrapper]
    saved, live = (wrap(old), new) if to_plain else (old, wrap(new))
    with checkpointer(saved, tmp_path / "old") as first:
        old[0](torch.tensor([[1, 2]])).sum().backward()
        first.optimizers[0].step()
        first.step()
        first.save("base").wait_until_done()
    with checkpointer(live, tmp_path / "new") as second:
        store = tmp_path / "old"
        report = second.recover(from_store=[store] if many else store)
        assert report.differences == []
        assert report.rows_restored == 30
    assert_same(dict(new.state_dict()), dict(old.state_dict()))
    states = [o.optimizers[0].state[m[0].weight]["sum"] for o, m in ((first, old), (second, new))]
    assert torch.equal(*states)


def test_strict_still_lists_what_differs_beyond_wrappers(tmp_path):
    with checkpointer(nn.DataParallel(make(1)), tmp_path / "old") as first:
        first.save("base").wait_until_done()
    other = make(2)
    other[1] = nn.Linear(4, 3)
    with checkpointer(other, tmp_path / "new") as second:
        before = copy.deepcopy(dict(other.state_dict()))
        with pytest.raises(StoreError, match=r"parameter '1\.weight' has") as error:
            second.recover(from_store=tmp_path / "old")
        assert "'2.weight'" not in str(error.value)
        assert_same(dict(other.state_dict()), before)
