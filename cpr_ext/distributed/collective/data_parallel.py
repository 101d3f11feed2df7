"""Find, check and reset DistributedDataParallel in workers that outlive each other.

A reducer learns its layout: after its first backward pass it regroups parameters into buckets in
the order in which gradients became ready. A replacement does not know that order, and the
position of a gradient in its bucket decides the order in which workers' values are added. So at the
start and after a loss every worker makes a new reducer, with a layout that it keeps for all steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cpr_ext.distributed.collective.torch_private import (
    has_final_buckets,
    hooks_of,
    logged,
    make_reducer,
    managed,
    require_known_reducer,
)
from cpr_ext.errors import UsageError
from cpr_ext.state.table import Table

# Modules and optimizers that keep a part of the dense state, or a state that no other worker has.
_REFUSED = {
    "FullyShardedDataParallel": "each worker holds a part of the dense parameters",
    "FSDPModule": "each worker holds a part of the dense parameters",
    "ZeroRedundancyOptimizer": "each worker holds a part of the optimizer's state",
    "PostLocalSGDOptimizer": "replicas differ between its averages",
}
_FUSED_HOOK = "hook_then_optimizer"


def find_ddp(model: nn.Module) -> dict[str, DistributedDataParallel]:
    """Return every DistributedDataParallel in ``model``, by name.

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
        require_known_reducer(ddp)
        if (reason := _why_refused(ddp)) is not None:
            raise UsageError(
                f"DistributedDataParallel '{name}' cannot be reset after a loss: {reason}"
            )


def reset(model: nn.Module) -> None:
    """Make new reducers for ``model``; gradients are dropped. Every worker calls it.

    After it, reducers of all workers keep the same layout, so they add the same
    gradients in the same order in every step.

    Raises:
        UsageError: as :func:`refuse_unsupported`.
    """
    refuse_unsupported(model, ())
    for ddp in find_ddp(model).values():
        make_reducer(ddp)


def layout_of(ddp: DistributedDataParallel, *, is_learned: bool = True) -> dict[str, Any]:
    """Return what must be the same in every worker for their gradients to be exchanged right; JSON.

    Args:
        is_learned: also the buckets, which a reducer that was just made does not have yet.
    """
    buckets = {
        "has_final_buckets": has_final_buckets(ddp),
        "buckets": logged(ddp, "rebuilt_per_bucket_param_indices"),
    }
    return {
        "parameters": [
            [name, str(parameter.dtype), list(parameter.shape)] for name, parameter in managed(ddp)
        ],
        "world_size": ddp.process_group.size(),
        "bucket_bytes": ddp.bucket_bytes_cap,
        "static_graph": ddp.static_graph,
        "find_unused_parameters": ddp.find_unused_parameters,
        "broadcast_buffers": bool(ddp.broadcast_buffers),
        "hook": logged(ddp, "comm_hook"),
        **(buckets if is_learned else {}),
    }


def replicated_tables(model: nn.Module, tables: Sequence[Table]) -> list[Table]:
    """Return the tables whose gradients a DistributedDataParallel of several workers sums.

    Each worker sees only its own lookups, but those of all workers change the rows.
    """
    reduced = {
        id(parameter)
        for ddp in find_ddp(model).values()
        if ddp.process_group.size() > 1
        for _, parameter in managed(ddp)
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


def _why_refused(ddp: DistributedDataParallel) -> str | None:
    if getattr(ddp, "_use_python_reducer", False):
        return 'torch._dynamo.config.optimize_ddp is "python_reducer"; use "ddp_optimizer"'
    if ddp.mixed_precision is not None:
        return "mixed_precision= keeps low-precision copies; use torch.autocast"
    if getattr(ddp, "_delay_all_reduce_params", None):
        return "delay_all_reduce_named_params= keeps a buffer of gradients; leave it out"
    for name, parameter in managed(ddp):
        if hasattr(parameter, "_in_backward_optimizers"):
            return (
                f"parameter '{name}' has its optimizer in backward, where a loss leaves part of a "
                "step done; give it to an optimizer that steps after backward"
            )
    for hook, state in hooks_of(ddp):
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


def _is_plain(state: Any) -> bool:
    if isinstance(state, tuple):
        return all(map(_is_plain, state))
    return state is None or isinstance(state, bool | int | float | str | dist.ProcessGroup)
