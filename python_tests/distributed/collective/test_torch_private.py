"""A torch that is not as those that were tried is refused by name when a worker starts."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cpr_ext.distributed.collective import data_parallel, torch_private
from cpr_ext.distributed.collective.process_group import init_group
from cpr_ext.errors import UsageError

PACKAGE = Path(data_parallel.__file__).parents[1]
PRIVATE = re.compile(
    r"from torch\.\S*_\S* import|dist\._|\bddp\._|\breducer\._|\bgloo\._|ProcessGroupGloo"
)
# Stores' types have no public name.
STORES = re.compile(r"from torch\._C\._distributed_c10d import (HashStore, PrefixStore, )?Store$")


@pytest.fixture
def alone():
    yield init_group(0, 2)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("owner", "name", "another", "named"),
    [
        (DistributedDataParallel, "_build_params_for_reducer", None, "_build_params_for_reducer"),
        (DistributedDataParallel, "_ddp_init_helper", lambda self, ps: None, "_ddp_init_helper"),
        (dist, "ProcessGroup", lambda s, r, w, options: None, "a gloo group .* 'options'"),
        (torch_private, "Reducer", object, "Reducer._rebuild_buckets"),
    ],
)
def test_another_torch_is_refused_when_the_group_is_made(monkeypatch, owner, name, another, named):
    monkeypatch.setattr(owner, name, another) if another else monkeypatch.delattr(owner, name)
    with pytest.raises(UsageError, match=rf"torch {re.escape(torch.__version__)} lacks.*{named}"):
        init_group(0, 2)
    assert not dist.is_initialized()


def test_an_instance_that_lacks_what_is_set_or_does_not_take_its_buckets_is_refused(
    alone, monkeypatch
):
    ddp = DistributedDataParallel(torch.nn.Linear(3, 2))
    monkeypatch.setattr(torch_private, "_push_buckets", lambda ddp: False)
    with pytest.raises(UsageError, match="buckets that are made before the first step"):
        data_parallel.reset(ddp)
    del ddp._comm_hooks
    with pytest.raises(UsageError, match=r"_comm_hooks. Tried: torch 2\.13\.0 and 2\.15\.0"):
        data_parallel.refuse_unsupported(ddp, ())


def test_private_names_of_torch_are_in_one_file():
    for path in PACKAGE.rglob("*.py"):
        if path.name != "torch_private.py":
            lines = [line for line in path.read_text().splitlines() if not STORES.match(line)]
            assert not [line for line in lines if PRIVATE.search(line)], path.name
