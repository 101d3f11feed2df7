"""Tables of which a module keeps newer rows in a cache."""

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.errors import UsageError


class Model(nn.Module):
    """With what FBGEMM's TBE shows of its memory: two tables in one piece, and a cache of rows."""

    def __init__(self, cached_rows):
        super().__init__()
        self.kernel, self.dense = nn.Module(), nn.Linear(4, 1)
        self.kernel.register_buffer("weights_uvm", torch.zeros(2 * 50 * 4))
        self.kernel.register_buffer("lxu_cache_weights", torch.zeros(cached_rows, 4))


def make(directory, cached_rows, tables=None):
    model = Model(cached_rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = tables or dict(zip("ab", model.kernel.weights_uvm.view(2, 50, 4), strict=True))
    return cpr_ext.Checkpointer(model, optimizer, directory, tables=named)


def test_a_table_with_a_cache_is_refused_by_name_and_one_without_or_elsewhere_is_not(tmp_path):
    with pytest.raises(UsageError, match=r"table 'a': Module 'kernel' caches its rows.*DEVICE"):
        make(tmp_path / "s", 8)
    assert not (tmp_path / "s").exists()
    make(tmp_path / "a", 0).close()
    make(tmp_path / "b", 8, {"elsewhere": torch.zeros(50, 4)}).close()
