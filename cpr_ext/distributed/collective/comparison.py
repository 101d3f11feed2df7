"""Check that workers hold the same job: they exchange checksums of the replicated state.

Compared are the position, dense parameters, their optimizers' groups and state, the layouts of
DistributedDataParallel, and the parts of tables. Not compared is the state of each worker: table
rows and their state, generators, extra state, buffers that are not saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cpr_ext._native import native
from cpr_ext.checkpointer.checkpointer import Checkpointer
from cpr_ext.distributed.collective.collectives import all_gather_json
from cpr_ext.distributed.collective.data_parallel import find_ddp, layout_of
from cpr_ext.errors import PeerLostError, WorkersDifferError
from cpr_ext.state.dense_schema import is_extra_state
from cpr_ext.state.dense_state import shared_optimizers
from cpr_ext.state.table import Table
from cpr_ext.state.table_plans import describe_table, plan_faults

Facts = dict[str, str]
_MOST_NAMED = 8


def require_same(
    group: dist.ProcessGroup, model: nn.Module, checkpointer: Checkpointer, *, buffers: bool
) -> None:
    """Compare what all members hold; every member returns, or every member raises.

    One small message each if all is the same. Where a checksum differs all facts are exchanged.

    Args:
        model: the one that trains; its DistributedDataParallel modules are compared.
        buffers: compare buffers, too. Between recoveries they may differ: batch norm's do.

    Raises:
        WorkersDifferError: names what differs, and what which worker holds.
    """
    facts = facts_of(model, checkpointer, buffers=buffers)
    if len(set(all_gather_json(group, digest_of(facts)))) > 1:
        _refuse(group, differences(all_gather_json(group, facts)), checkpointer.step_count)


def require_one_contract(group: dist.ProcessGroup, digests: Sequence[str], own: Facts) -> None:
    """Raise WorkersDifferError if members were given different options; names them.

    Args:
        digests: of the contracts of all, as they said; all know the same.
        own: the contract of this worker, an option each.
    """
    if len(set(digests)) > 1:
        found = differences(all_gather_json(group, own))
        _let_all_know(group)
        raise WorkersDifferError(
            f"the workers of this job differ in {'; '.join(found)}. Start all of them alike"
        )


def digest_of(value: Any) -> str:
    """Return a digest of a JSON value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def require_one_layout(group: dist.ProcessGroup, model: nn.Module) -> None:
    """Compare what DistributedDataParallel modules are given, before their reducers exchange data.

    Raises:
        WorkersDifferError: names the module and what differs.
    """
    _refuse(
        group, differences(all_gather_json(group, _layout_facts(model, is_learned=False))), None
    )


def require_one_plan(group: dist.ProcessGroup, tables: Sequence[Table], known: str = "") -> str:
    """Compare how all members cut the tables.

    One small message each if a member has seen that all of them fit together.

    Args:
        known: what this returned before; empty: nothing.

    Returns:
        A digest of the plans of all, which fit together.

    Raises:
        WorkersDifferError: parts of a table overlap, leave some of it out, or are of another table.
    """
    plan = _plan(tables)
    own, seen = zip(*all_gather_json(group, (digest_of(plan), known)), strict=True)
    of_all = digest_of(own)
    if of_all in seen:
        return of_all
    said = [plan] * len(own) if len(set(own)) == 1 else all_gather_json(group, plan)
    plans = [{name: tuple(p) for name, p in plan.items()} for plan in said]
    _refuse(group, plan_faults(plans), None)
    return of_all


def facts_of(model: nn.Module, checkpointer: Checkpointer, *, buffers: bool) -> Facts:
    """Return the state that all workers share: names, and values or checksums."""
    facts = {"step": str(checkpointer.step_count), "samples": str(checkpointer.num_samples)}
    tables = {id(table.weight) for table in checkpointer.tables}
    names = {}
    for name, value in checkpointer.model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or id(value) in tables or is_extra_state(name):
            continue
        names[id(value)] = name
        if isinstance(value, nn.Parameter):
            facts[f"parameter '{name}'"] = checksum(value)
        elif buffers:
            facts[f"buffer '{name}'"] = checksum(value)
    for number, optimizer in enumerate(
        shared_optimizers(checkpointer.optimizers, checkpointer.tables)
    ):
        facts |= _optimizer_facts(number, optimizer, tables, names)
    return facts | _layout_facts(model, is_learned=True)


def checksum(values: torch.Tensor) -> str:
    """Return type, shape and CRC32C of a tensor, on whatever device."""
    content = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    code = native.crc32c(content.numpy())
    return f"{str(values.dtype).removeprefix('torch.')}{list(values.shape)} {code:08x}"


def differences(said: Sequence[Mapping[str, str]]) -> list[str]:
    """Return differences between workers' facts, one sentence each, in the facts' order."""
    names = dict.fromkeys(name for facts in said for name in facts)
    found = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, facts in enumerate(said):
            ranks_of.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(ranks_of) > 1:
            held = "; ".join(
                f"workers {ranks}: {_shortened(value)}" for value, ranks in ranks_of.items()
            )
            found.append(f"{name} ({held})")
    return found


def _plan(tables: Sequence[Table]) -> dict[str, list[Any]]:
    return {
        table.name: list(describe_table(table.embedding_dim, table.weight.dtype, table.part))
        for table in tables
    }


def _layout_facts(model: nn.Module, *, is_learned: bool) -> Facts:
    """Return facts of DistributedDataParallel; ``is_learned``: also those of its reducers."""
    return {
        f"DistributedDataParallel '{name}': {key}": json.dumps(value)
        for name, ddp in find_ddp(model).items()
        for key, value in layout_of(ddp, is_learned=is_learned).items()
    }


def _optimizer_facts(
    number: int, optimizer: torch.optim.Optimizer, tables: set[int], names: Mapping[int, str]
) -> Facts:
    title = f"optimizer {number} ({type(optimizer).__name__})"
    facts = {
        f"{title}, group {index}: {key}": _described(value)
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        if id(parameter) in tables:
            continue  # of rows, and a worker's own
        name = names.get(id(parameter), f"number {index}")
        for key, value in optimizer.state.get(parameter, {}).items():
            facts[f"{title}: {key} of parameter '{name}'"] = _described(value)
    return facts


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return checksum(value)
    return repr(value) if _is_plain(value) else type(value).__name__


def _is_plain(value: Any) -> bool:
    """Return whether equal values have the same text in every process: no function, no address."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _shortened(value: str) -> str:
    return value if len(value) <= 100 else f"{value[:100]}..."


def _let_all_know(group: dist.ProcessGroup) -> None:
    """Wait so long that none leaves, and breaks its connections, before all have the facts."""
    with suppress(RuntimeError, PeerLostError):
        all_gather_json(group, None)


def _refuse(group: dist.ProcessGroup, found: Sequence[str], step: int | None) -> None:
    if not found:
        return
    _let_all_know(group)
    more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    when = "" if step is None else f" after step {step}"
    raise WorkersDifferError(
        f"workers do not hold the same job{when}, so none trains on: "
        + "; ".join(found[:_MOST_NAMED])
        + f"{more}. Start all again: they take the newest snapshot's dense part. If this "
        "happens again, look for a worker with other code, data, torch or processor, or bad memory"
    )
