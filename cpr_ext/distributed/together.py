"""Recovery of all ranks of an ordinary process group, to one step: without a :class:`Worker`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from cpr_ext.checkpointer.checkpointer import Checkpointer
from cpr_ext.distributed.collective.collectives import all_gather_json, broadcast_part
from cpr_ext.distributed.collective.comparison import checksum, require_one_plan, require_same
from cpr_ext.distributed.collective.data_parallel import refuse_replicated_tables
from cpr_ext.distributed.collective.process_group import BACKEND
from cpr_ext.distributed.common_points import points_in
from cpr_ext.errors import CprError, StoreError, UntrackedChangeWarning, UsageError
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.state.dense_schema import read_position
from cpr_ext.state.dense_state import DensePart

_NOT_REPLICATED = (
    "{names} of this process was not the same as that of rank {source} at the same step, and is "
    "replaced by it. If each process has its own, such as a reader of its own files, say so: "
    "state={{'reader': cpr_ext.PerRank(reader)}}"
)
Recover = Callable[..., RecoveryReport]
_Result = TypeVar("_Result")


def must_agree() -> bool:
    """Return whether this process is one of several that must recover together.

    Workers that outlive each other agree by themselves.
    """
    return (
        dist.is_available()
        and dist.is_initialized()
        and dist.get_world_size() > 1
        and dist.get_backend() != BACKEND
    )


def recover_together(
    checkpointer: Checkpointer,
    *,
    model: nn.Module | None = None,
    recover: Recover | None = None,
    **options: Any,
) -> RecoveryReport:
    """Recover every rank from its own store, all to the same step. Every rank calls it.

    Ranks save when they are ready, so their newest snapshots may be some steps apart. Each restores
    its rows; then all take the dense part and the position of the furthest rank. Generators stay
    each rank's own. With ``mode="full"`` all go back to the newest point that all have.

    Args:
        checkpointer: this rank's.
        model: the one that trains, if it is not the Checkpointer's.
        recover: what restores this rank alone; by default ``checkpointer.recover``.
        options: of :meth:`Checkpointer.recover`, the same on every rank; without ``shards``.

    Returns:
        What this rank restored; position and extra state are those of all. ``samples_lost`` holds
        the samples that its rows lack.

    Raises:
        UsageError: the process group has no backend for CPU tensors, or a table is replicated.
        StoreError: a rank could not recover, or ranks have no full-recovery point in common; every
            rank raises, and the steps of all are named.
        WorkersDifferError: after it ranks differ in what must be the same.
    """
    group = _group()
    recover = recover or checkpointer.recover
    model = model or checkpointer.model
    _all_or_none(group, lambda: refuse_replicated_tables(model, checkpointer.tables))
    if options.get("mode") == "full":
        options["up_to_step"] = _common_point(group, checkpointer, options)
    report = _all_or_none(group, lambda: recover(**options))
    steps = [int(step) for step in all_gather_json(group, report.step)]
    if options.get("mode") == "full" and len(set(steps)) > 1:
        raise StoreError(
            f"ranks recovered to different steps, by rank: {steps}. A full recovery needs one that "
            'all have: recover with mode="partial", or remove the new stores and start again'
        )
    report = _load_replicated_state(group, checkpointer, report, source=steps.index(max(steps)))
    require_one_plan(group, checkpointer.tables)
    require_same(group, model, checkpointer, buffers=True)
    return report


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    if "gloo" not in (kinds := str(dist.get_backend_config(group))) and "mpi" not in kinds:
        raise UsageError(
            f"the process group's backends are {kinds}; ranks agree on a recovery by CPU tensors: "
            'init_process_group("cpu:gloo,cuda:nccl")'
        )
    return group


def _all_or_none(group: dist.ProcessGroup, act: Callable[[], _Result]) -> _Result:
    """Call ``act`` on every rank; if one rank fails, every rank raises."""
    results, error = [], None
    try:
        results.append(act())
    except (CprError, OSError) as caught:
        error = caught
    said = all_gather_json(group, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if failed := [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]:
        raise StoreError(f"nothing is trained, as not all could recover; {'; '.join(failed)}")
    return results[0]


def _common_point(
    group: dist.ProcessGroup, checkpointer: Checkpointer, options: dict[str, Any]
) -> int | None:
    """Return the newest full-recovery point of all stores; what was asked for if some are empty."""
    limit: int | None = options.get("up_to_step")
    store = checkpointer.store
    own = [step for step in points_in(store) if limit is None or step <= limit]
    said: Sequence[Any] = all_gather_json(group, {"is_empty": store.is_empty, "points": own})
    if any(told["is_empty"] for told in said):
        return limit
    common = set.intersection(*(set(told["points"]) for told in said))
    if not common:
        points = {rank: told["points"] for rank, told in enumerate(said)}
        raise StoreError(
            f"no full-recovery point is in all stores; their steps by rank: {points}. Make them at "
            'the same steps everywhere (AllRows(), EverySteps, when_busy="wait", '
            "Retention(full_recovery_points=3)), or recover partially"
        )
    return int(max(common))


def _load_replicated_state(
    group: dist.ProcessGroup, checkpointer: Checkpointer, report: RecoveryReport, *, source: int
) -> RecoveryReport:
    """Take the dense part and the position of the rank ``source``; the report with them."""
    own = checkpointer.replicated_state(report)
    part = broadcast_part(group, source, own if dist.get_rank(group) == source else None)
    position = read_position(part.tree())
    if position.step == report.step and (named := _declared_that_differ(own, part, checkpointer)):
        text = _NOT_REPLICATED.format(names=", ".join(named), source=source)
        warnings.warn(text, UntrackedChangeWarning, stacklevel=3)
        report = replace(report, differences=[*report.differences, text])
    lost = max(0, position.num_samples - report.num_samples)
    if position.step != report.step and checkpointer.declared.own:
        text = f"PerRank state is of step {report.step}, the job resumes at {position.step}"
        report = replace(report, differences=[*report.differences, text])
    if position.step > report.step:
        # Of the steps between, nobody knows which rows of this rank changed.
        report = replace(report, rows_stale=None, row_updates_lost=None)
    return replace(
        report,
        step=position.step,
        num_samples=position.num_samples,
        samples_lost=report.samples_lost + lost,
        state=checkpointer.load_replicated_state(part, generators=False, samples_lost=lost),
    )


def _declared_that_differ(own: DensePart, part: DensePart, checkpointer: Checkpointer) -> list[str]:
    """Return what the user declared, and did not mark as ``PerRank``, that differs in two parts.

    At one step, what all ranks have in common is the same on all of them.
    """
    declared = checkpointer.declared
    paths: list[tuple[str, ...]] = [("state", name) for name in declared.objects]
    paths += [("extra", "values", name) for name in declared.values]
    return [
        f"state[{path[-1]!r}]"
        for path in paths
        if path[-1] not in declared.own and _values_at(own, *path) != _values_at(part, *path)
    ]


def _values_at(part: DensePart, *path: str) -> tuple[Any, dict[str, str]]:
    """Return the values below a path of a dense part; tensors as their checksums."""
    value: Any = part.skeleton
    for key in path:
        value = value.get(key, {})
    name = ".".join(("dense", *path))
    tensors = {
        each: checksum(tensor)
        for each, tensor in part.tensors.items()
        if each == name or each.startswith(f"{name}.")
    }
    return value, tensors
