"""What of DistributedDataParallel is found, reset, or refused by name; in one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim import _apply_optimizer_in_backward as apply_in_backward
from torch.nn.parallel import DistributedDataParallel

from cpr_ext.distributed.collective import data_parallel
from cpr_ext.distributed.collective.process_group import init_group
from cpr_ext.errors import UsageError
from cpr_ext.state.table import find_tables


@pytest.fixture(autouse=True)
def group():
    """This process is one of two, as while a worker builds its model."""
    group = init_group(0, 2)
    yield group
    dist.destroy_process_group()


def linear():
    return torch.nn.Linear(3, 2)


def ddp(module=None, **options):
    return DistributedDataParallel(module or linear(), **options)


def test_modules_in_lists_that_are_no_module_lists_are_found():
    model = torch.nn.Sequential(linear(), ddp())
    model[0].lookups = [linear(), ddp()]
    model.other = torch.compile(ddp(), backend="eager")
    found = data_parallel.find_ddp(model)
    assert sorted(found) == ["0.lookups.1", "1", "other._orig_mod"]


def test_gradients_are_reduced_once_after_a_reset(group, monkeypatch):
    model = ddp()
    data_parallel.reset(model)
    data_parallel.reset(model)
    reduced = []

    def reduce(operation, *arguments, **options):
        reduced.append(operation)
        work = torch.futures.Future()
        work.set_result(arguments[0])
        return torch._C._distributed_c10d._create_work_from_future(work)

    monkeypatch.setattr(type(group), "_call", lambda self, *a, **o: reduce(*a, **o))
    model(torch.ones(4, 3)).sum().backward()
    assert reduced == ["allreduce"]
    assert torch.equal(model.module.bias.grad, torch.full((2,), 2.0))  # halved: of two workers


def stepping_in_backward():
    module = linear()
    apply_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    return ddp(module)


def delayed():
    module = torch.nn.Sequential(linear(), linear())
    named, hooked = [("0.weight", module[0].weight)], module[1].weight
    return ddp(module, delay_all_reduce_named_params=named, param_to_hook_all_reduce=hooked)


def changed(call, *given):
    """A module of which a method was called."""
    getattr(model := ddp(), call)(*given)
    return model


def powersgd():
    state = powerSGD_hook.PowerSGDState(process_group=None)
    return changed("register_comm_hook", state, powerSGD_hook.powerSGD_hook)


class FSDPModule:
    """Named as the class that ``torch.distributed.fsdp.fully_shard`` mixes in."""


class FSDPLinear(FSDPModule, torch.nn.Linear):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (powersgd, r"'inner' .* powerSGD_hook keeps a state of its own \(PowerSGDState\)"),
        (stepping_in_backward, "parameter 'weight' has its optimizer in backward"),
        (lambda: changed("_register_fused_optim", torch.optim.SGD, 0.1), "_register_fused_optim"),
        (delayed, "delay_all_reduce_named_params"),
        (lambda: FSDPLinear(2, 2), "FSDPModule cannot be used .* a part of the dense parameters"),
    ],
)
def test_what_cannot_be_reset_is_refused_by_name(make, message):
    model = torch.nn.ModuleDict({"inner": make()})
    for call in (partial(data_parallel.refuse_unsupported, optimizers=()), data_parallel.reset):
        with pytest.raises(UsageError, match=message):
            call(model)
    optimizer = ZeroRedundancyOptimizer.__new__(ZeroRedundancyOptimizer)
    with pytest.raises(UsageError, match="ZeroRedundancyOptimizer cannot be used"):
        data_parallel.refuse_unsupported(ddp(), [optimizer])


def test_hooks_without_a_state_of_their_own_are_kept(group):
    for module in (
        changed("register_comm_hook", group, default_hooks.allreduce_hook),
        changed("_register_builtin_comm_hook", dist.BuiltinCommHookType.FP16_COMPRESS),
    ):
        data_parallel.reset(module)
        before = data_parallel.layout_of(module)
        data_parallel.reset(module)
        assert data_parallel.layout_of(module) == before
        assert before["hook"]


def test_a_table_in_data_parallelism_is_replicated_also_where_it_is_tied():
    table = torch.nn.EmbeddingBag(10, 2)
    tied = torch.nn.Embedding(10, 2)
    tied.weight = table.weight
    own = torch.nn.Embedding(10, 2)
    model = torch.nn.ModuleDict({"tied": tied, "own": own, "shared": ddp(table)})
    tables = find_tables(model)
    assert [t.name for t in data_parallel.replicated_tables(model, tables)] == ["tied"]
    with pytest.raises(UsageError, match="table 'tied': replicated by DistributedDataParallel"):
        data_parallel.refuse_replicated_tables(model, tables)
    module = torch.nn.Sequential(torch.nn.Embedding(10, 2), linear())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    ignores = ddp(module)
    assert data_parallel.replicated_tables(ignores, find_tables(ignores)) == []


def test_layouts_differ_by_what_a_module_is_given():
    frozen = linear()
    frozen.bias.requires_grad_(False)
    layouts = [
        data_parallel.layout_of(made, is_learned=False)
        for made in (
            *(ddp(), ddp(frozen), ddp(torch.nn.Linear(3, 4)), ddp(static_graph=True)),
            *(ddp(find_unused_parameters=True), ddp(broadcast_buffers=False), ddp(bucket_cap_mb=1)),
        )
    ]
    keys = [{k for k in each if each[k] != layouts[0][k]} for each in layouts[1:]]
    assert keys == [
        *({"parameters"}, {"parameters"}, {"static_graph"}, {"find_unused_parameters"}),
        *({"broadcast_buffers"}, {"bucket_bytes"}),
    ]
