"""What live recovery takes from torch that torch does not promise to keep, all of it.

Tried with the versions of ``TRIED``. When it starts, a worker refuses another version by name.
It does so if one of these names is missing, takes other arguments, or fails a small trial.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    BuiltinCommHookType,
    HashStore,
    Reducer,
    Store,
    _create_work_from_future,
)
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from cpr_ext.errors import UsageError

TRIED = ("2.13.0", "2.15.0")
# Of DistributedDataParallel: the arguments behind self.
_METHODS = {
    "_build_params_for_reducer": (),
    "_build_debug_param_to_name_mapping": ("parameters",),
    "_ddp_init_helper": (
        *("parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph"),
    ),
    "_get_ddp_logging_data": (),
    "_register_builtin_comm_hook": ("comm_hook_type",),
    "_set_static_graph": (),
    "register_comm_hook": ("state", "hook"),
}
_ATTRIBUTES = ("_comm_hooks", "_has_rebuilt_buckets", "require_forward_param_sync", "reducer")
_OF_REDUCERS = ("_push_all_rebuilt_params", "_rebuild_buckets", "_remove_autograd_hooks")


# Gloo reads these. A value of a member has no 8 bytes for each other member then, and each member
# asks once for the values of all.
_FEW_BYTES = ("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "GLOO_ENABLE_STORE_V2_API")


def exchange_few_bytes() -> None:
    """Have groups of this process form by messages that do not grow with the number of members.

    All members must do it.
    """
    os.environ.update(dict.fromkeys(_FEW_BYTES, "1"))


def require_known_torch() -> None:
    """Refuse a torch in which a group cannot be formed, or a reducer made, as it is done here.

    Raises:
        UsageError: names what it lacks, and the versions that were tried.
    """
    lacks = [name for name, takes in _METHODS.items() if _arguments_of(name) != takes]
    lacks += [f"Reducer.{name}" for name in _OF_REDUCERS if not hasattr(Reducer, name)]
    try:
        _try_group()
    except (AttributeError, TypeError, RuntimeError, ImportError) as error:
        lacks.append(f"a gloo group ({str(error).splitlines()[0]})")
    _refuse(lacks)


def require_known_reducer(ddp: DistributedDataParallel) -> None:
    """Refuse an instance that lacks what is set in :func:`make_reducer`.

    Raises:
        UsageError: as :func:`require_known_torch`.
    """
    _refuse([name for name in _ATTRIBUTES if not hasattr(ddp, name)])


def make_group(
    store: Store, rank: int, world_size: int, seconds: float, address: str | None
) -> tuple[dist.ProcessGroup, Any]:
    """Return a group of gloo, and what holds its connections; all members must call it.

    Args:
        seconds: in which all must have connected.
        address: under which peers reach this process; None: what the host's name resolves to.

    Raises:
        RuntimeError: not all have connected.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=seconds)
    options._devices = [
        dist.ProcessGroupGloo.create_default_device()
        if address is None
        else dist.ProcessGroupGloo.create_device(hostname=address)
    ]
    gloo = dist.ProcessGroupGloo(store, rank, world_size, options)
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group, gloo


def set_time_out(gloo: Any, time_out: timedelta) -> None:
    """Set the time-out of every later collective."""
    gloo._set_default_timeout(time_out)


def completed_work(future: torch.futures.Future[Any]) -> Any:
    """Return the work whose future this is."""
    return _create_work_from_future(future)


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as compiled modules call it between their graphs."""
    return _disable_dynamo(function)


def hooks_of(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """Return the communication hooks in Python, and their states."""
    return list(ddp._comm_hooks)


def logged(ddp: DistributedDataParallel, name: str) -> str:
    """Return what the logger of ``ddp`` says of ``name``."""
    return str(ddp._get_ddp_logging_data().get(name, ""))  # type: ignore[no-untyped-call]


def has_final_buckets(ddp: DistributedDataParallel) -> bool:
    """Return whether parameters are in the buckets in which they stay."""
    return bool(ddp._has_rebuilt_buckets)


def managed(ddp: DistributedDataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters whose gradients ``ddp`` sums."""
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and name not in ddp.parameters_to_ignore:
            yield name, parameter


def make_reducer(ddp: DistributedDataParallel) -> None:
    """Make a new reducer for ``ddp``, with buckets that stay; gradients are dropped.

    The members of its group must all call it.

    Raises:
        UsageError: torch does not take the buckets.
    """
    builtin, was_static = _builtin_hook(ddp), ddp.static_graph
    ddp.reducer._remove_autograd_hooks()
    parameters, are_sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    learns = was_static or not ddp.find_unused_parameters
    if learns:
        # Buckets are filled in this order, and sent once full: gradients of what was made last are
        # ready first. Otherwise torch itself turns the order round.
        parameters, are_sparse = parameters[::-1], are_sparse[::-1]
    for parameter in parameters:
        parameter.grad = None  # it may be a view of an old bucket
    names = ddp._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
    ddp.static_graph = False
    ddp._ddp_init_helper(parameters, are_sparse, names, was_static)  # type: ignore[no-untyped-call]
    if was_static:
        ddp._set_static_graph()  # type: ignore[no-untyped-call]
    ddp._has_rebuilt_buckets = _push_buckets(ddp)
    if ddp._has_rebuilt_buckets != learns:
        _refuse(["buckets that are made before the first step"])
    # A loss inside no_sync() leaves False: then this worker alone would not broadcast buffers.
    ddp.require_forward_param_sync = True
    hooks, ddp._comm_hooks = hooks_of(ddp), []
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    if builtin is not None:
        ddp._register_builtin_comm_hook(builtin)  # type: ignore[no-untyped-call]


def _push_buckets(ddp: DistributedDataParallel) -> bool:
    """Have the reducer make now the buckets that it would make after the first step."""
    ddp.reducer._push_all_rebuilt_params()
    return bool(ddp.reducer._rebuild_buckets())


def _builtin_hook(ddp: DistributedDataParallel) -> Any:
    """Return the hook of torch's own in C++, which only the logger knows of; None without one."""
    kinds = (BuiltinCommHookType.ALLREDUCE, BuiltinCommHookType.FP16_COMPRESS)
    named = logged(ddp, "comm_hook")
    return next((kind for kind in kinds if not hooks_of(ddp) and str(kind) == named), None)


def _arguments_of(method: str) -> tuple[str, ...] | None:
    found = getattr(DistributedDataParallel, method, None)
    return None if found is None else tuple(inspect.signature(found).parameters)[1:]


def _try_group() -> None:
    """Form a group of this process alone, and use it."""
    group, gloo = make_group(HashStore(), 0, 1, 5.0, "127.0.0.1")
    set_time_out(gloo, timedelta(seconds=5))
    values = torch.ones(2)
    group.allreduce([values]).wait()
    completed_work(torch.futures.Future())
    outside_graphs(_try_group)


def _refuse(lacks: list[str]) -> None:
    if lacks:
        raise UsageError(
            f"torch {torch.__version__} lacks, or takes otherwise, what workers that outlive each "
            f"other need: {', '.join(lacks)}. Tried: torch {' and '.join(TRIED)}"
        )
