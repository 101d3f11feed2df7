"""Tables of which a module keeps newer rows in a cache."""

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.errors import UsageError


class Kernel(nn.Module):
    """What FBGEMM's TBE shows of its memory: two tables in one piece, and a cache of their rows."""

    def __init__(self, cached_rows):
        super().__init__()
        self.register_buffer("weights_uvm", torch.zeros(2 * 50 * 4))
        self.register_buffer("lxu_cache_weights", torch.zeros(cached_rows, 4))

    def tables(self):
        first, second = self.weights_uvm.view(2, 50, 4)
        return {"first": first, "second": second}


class Model(nn.Module):
    def __init__(self, cached_rows):
        super().__init__()
        self.kernel = Kernel(cached_rows)
        self.dense = nn.Linear(4, 1)


def make(directory, cached_rows, tables):
    model = Model(cached_rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = model.kernel.tables() if tables is None else tables
    return cpr_ext.Checkpointer(model, optimizer, directory, tables=named)


def test_a_table_with_a_cache_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match=r"table 'first': Kernel 'kernel' caches its rows.*DEVICE"):
        make(tmp_path / "s", 8, None)
    assert not (tmp_path / "s").exists()


def test_a_table_without_a_cache_and_one_elsewhere_are_not(tmp_path):
    make(tmp_path / "a", 0, None).close()
    make(tmp_path / "b", 8, {"elsewhere": torch.zeros(50, 4)}).close()
