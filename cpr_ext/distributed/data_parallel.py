"""DistributedDataParallel in workers that outlive each other: found, checked, and reset.

A reducer learns its layout: after its first backward pass it regroups parameters into buckets in
the order in which gradients became ready. A replacement knows nothing of that order, and where a
gradient lies in its bucket decides in which order workers' values are added. So at the start and
after a loss every worker makes its reducer anew, with a layout that it keeps for all steps. All of
torch's private names for that are in this file.

Tried with torch 2.13; another version is refused by name if it lacks one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel

from cpr_ext.errors import UsageError
from cpr_ext.tables import Table

_NEEDED = (
    *("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper"),
    "_comm_hooks",
)
# Modules and optimizers that keep a part of the dense state, or a state that no other worker has.
_REFUSED = {
    "FullyShardedDataParallel": "each worker holds a part of the dense parameters",
    "FSDPModule": "each worker holds a part of the dense parameters",
    "ZeroRedundancyOptimizer": "each worker holds a part of the optimizer's state",
    "PostLocalSGDOptimizer": "replicas differ between its averages",
}
_FUSED_HOOK = "hook_then_optimizer"


def find_ddp(model: nn.Module) -> dict[str, DistributedDataParallel]:
    """Every DistributedDataParallel in ``model``, by name.

    Found are also modules that are plain attributes, or in lists that are, as TorchRec keeps those
    of its replicated tables.
    """
    return {
        name: module
        for name, module in _all_modules("", model, set())
        if isinstance(module, DistributedDataParallel)
    }


def refuse_unsupported(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse what cannot be reset after a loss.

    Raises:
        UsageError: names it, and the remedy.
    """
    for kind in [type(module) for _, module in _all_modules("", model, set())] + [
        type(optimizer) for optimizer in optimizers
    ]:
        for name in (base.__name__ for base in kind.__mro__):
            if name in _REFUSED:
                raise UsageError(
                    f"{name} cannot be used in a worker that outlives others: {_REFUSED[name]}. "
                    "Use DistributedDataParallel, or restart all workers together"
                )
    for name, ddp in find_ddp(model).items():
        if (reason := _why_refused(ddp)) is not None:
            raise UsageError(
                f"DistributedDataParallel '{name}' cannot be reset after a loss: {reason}"
            )


def reset(model: nn.Module) -> None:
    """Make all reducers of ``model`` anew; gradients are dropped. Every worker calls it.

    After it, reducers of workers of any age have the same layout, and keep it: the same gradients
    are added in the same order in every step.

    Raises:
        UsageError: as :func:`refuse_unsupported`.
    """
    refuse_unsupported(model, ())
    for ddp in find_ddp(model).values():
        _reset(ddp)


def layout_of(ddp: DistributedDataParallel) -> dict[str, Any]:
    """What must be the same in every worker for their gradients to be exchanged right; JSON."""
    learned = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return {
        "parameters": [
            [name, str(parameter.dtype), list(parameter.shape)] for name, parameter in _managed(ddp)
        ],
        "world_size": ddp.process_group.size(),
        "bucket_bytes": ddp.bucket_bytes_cap,
        "static_graph": ddp.static_graph,
        "find_unused_parameters": ddp.find_unused_parameters,
        "broadcast_buffers": bool(ddp.broadcast_buffers),
        "hook": str(learned.get("comm_hook", "")),
        "has_learned": bool(ddp._has_rebuilt_buckets),
        "learned_buckets": str(learned.get("rebuilt_per_bucket_param_indices", "")),
    }


def replicated_tables(model: nn.Module, tables: Sequence[Table]) -> list[Table]:
    """The tables whose gradients a DistributedDataParallel of several workers sums.

    Each worker sees only its own lookups, but those of all workers change the rows.
    """
    reduced = {
        id(parameter)
        for ddp in find_ddp(model).values()
        if ddp.process_group.size() > 1
        for _, parameter in _managed(ddp)
    }
    return [table for table in tables if id(table.weight) in reduced]


def refuse_replicated_tables(model: nn.Module, tables: Sequence[Table]) -> None:
    """Refuse tables of which a worker does not see all that changes.

    Raises:
        UsageError: names them, and the remedy.
    """
    if found := replicated_tables(model, tables):
        names = ", ".join(f"'{table.name}'" for table in found)
        raise UsageError(
            f"table {names}: replicated by DistributedDataParallel. Lookups of all workers change "
            "its rows, each worker counts only its own, and a snapshot would lack the others. Save "
            "it as a dense parameter, by leaving it out: Checkpointer(..., tables=[...] or {...}); "
            "or shard it, outside of DistributedDataParallel"
        )


def _all_modules(prefix: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for name, inner in module.named_modules(prefix=prefix):
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        yield name, inner
        for attribute, value in vars(inner).items():
            kept = value if isinstance(value, list | tuple) else [value]
            for number, item in enumerate(kept):
                if isinstance(item, nn.Module):
                    yield from _all_modules(f"{name}.{attribute}.{number}".strip("."), item, seen)


def _managed(ddp: DistributedDataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and name not in ddp.parameters_to_ignore:
            yield name, parameter


def _why_refused(ddp: DistributedDataParallel) -> str | None:
    if getattr(ddp, "_use_python_reducer", False):
        return 'torch._dynamo.config.optimize_ddp is "python_reducer"; use "ddp_optimizer"'
    if ddp.mixed_precision is not None:
        return "mixed_precision= keeps low-precision copies; use torch.autocast"
    if getattr(ddp, "_delay_all_reduce_params", None):
        return "delay_all_reduce_named_params= keeps a buffer of gradients; leave it out"
    missing = [name for name in _NEEDED if not hasattr(ddp, name)]
    if missing or not hasattr(ddp.reducer, "_remove_autograd_hooks"):
        return f"torch {torch.__version__} lacks {missing or '_remove_autograd_hooks'}; tried: 2.13"
    for name, parameter in _managed(ddp):
        if hasattr(parameter, "_in_backward_optimizers"):
            return (
                f"parameter '{name}' has its optimizer in backward, where a loss leaves part of a "
                "step done; give it to an optimizer that steps after backward"
            )
    for hook, state in _hooks_of(ddp):
        if _FUSED_HOOK in hook.__qualname__:
            return "_register_fused_optim() steps in backward; use an ordinary optimizer"
        owner = getattr(hook, "__self__", None)
        for kept in (state, owner):
            if not _is_plain(kept):
                return (
                    f"communication hook {hook.__qualname__} keeps a state of its own "
                    f"({type(kept).__name__}), which a replacement would not have. Hooks with no "
                    "state, a process group, or plain constants as state can be used"
                )
    return None


def _hooks_of(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    return list(ddp._comm_hooks)


def _is_plain(state: Any) -> bool:
    if isinstance(state, tuple):
        return all(map(_is_plain, state))
    return state is None or isinstance(state, bool | int | float | str | dist.ProcessGroup)


def _reset(ddp: DistributedDataParallel) -> None:
    builtin, was_static = _builtin_hook(ddp), ddp.static_graph
    ddp.reducer._remove_autograd_hooks()
    parameters, are_sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    if was_static or not ddp.find_unused_parameters:
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
    ddp.reducer._push_all_rebuilt_params()
    ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()
    # A loss inside no_sync() leaves False: then this worker alone would not broadcast buffers.
    ddp.require_forward_param_sync = True
    hooks, ddp._comm_hooks = _hooks_of(ddp), []
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    if builtin is not None:
        ddp._register_builtin_comm_hook(builtin)  # type: ignore[no-untyped-call]


def _builtin_hook(ddp: DistributedDataParallel) -> Any:
    """The hook of torch's own in C++, which only the logger knows of; None without one."""
    named = str(ddp._get_ddp_logging_data().get("comm_hook", ""))  # type: ignore[no-untyped-call]
    kinds = (BuiltinCommHookType.ALLREDUCE, BuiltinCommHookType.FP16_COMPRESS)
    return next((kind for kind in kinds if not _hooks_of(ddp) and str(kind) == named), None)
