"""NCCL behind the group that is formed again, as far as a torch without it shows that."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from cpr_ext.distributed.collective.process_group import Round, init_group
from cpr_ext.errors import UsageError

VARIABLES = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


MADE = []


class FakeNCCL(dist.ProcessGroupGloo):
    """Gloo in NCCL's place; what was made."""

    class Options:
        _timeout = None

    def __init__(self, store, rank, world_size, options):
        gloo = dist.ProcessGroupGloo._Options()
        gloo._timeout = options._timeout
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        super().__init__(store, rank, world_size, gloo)
        assert {name: os.environ.get(name) for name in VARIABLES} == VARIABLES
        MADE.append((self, store, options._timeout))


@pytest.fixture
def group(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "of before")
    MADE.clear()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    yield init_group(0, 1, nccl=True)
    dist.destroy_process_group()


def test_every_round_has_a_communicator_of_its_own_which_ends_with_it(group):
    time_out = timedelta(seconds=7)
    for number in range(2):
        group.configure(Round(HashStore(), time_out, "127.0.0.1"))
        inner = group.connect()
        assert len(MADE) == number + 1
        nccl, _, given = MADE[-1]
        assert given == time_out
        assert inner._get_backend(torch.device("cuda")) is nccl
        assert inner._get_backend(torch.device("cpu")) is not nccl
        group.allreduce([torch.ones(1)]).wait()
        group.abort()
    assert MADE[0][1] is not MADE[1][1]
    assert dist.new_group([0]).uses_nccl


def test_a_torch_without_it_is_refused_before_anything_is_made(monkeypatch):
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    with pytest.raises(UsageError, match="has no NCCL: install a build with CUDA, or leave nccl"):
        init_group(0, 1, nccl=True)
    assert not dist.is_initialized()
    group = init_group(0, 1)  # it is not asked for
    group.configure(Round(HashStore(), timedelta(seconds=7), "127.0.0.1"))
    group.connect()
    group.abort()
    dist.destroy_process_group()
