"""Options of a worker: the recovery, and the Checkpointer if the user makes none."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from cpr_ext.checkpointer.checkpointer import Checkpointer
from cpr_ext.checkpointer.options import StoreOptions
from cpr_ext.distributed.collective import data_parallel
from cpr_ext.distributed.parity.options import Parity
from cpr_ext.errors import UsageError
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.runtime.validation import require_one_of
from cpr_ext.saving.schedules import Schedule
from cpr_ext.state.table import find_tables
from cpr_ext.storage.retention import Retention
from cpr_ext.wings.policy.target_pls import TargetPLS

logger = logger_of("jobs")

Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]
Recoveries = Literal["partial", "full", "exact"]
MakeCheckpointer = Callable[[nn.Module, Any, Path], Checkpointer]


def require_recovery(recovery: str, parity: Parity | None) -> None:
    """Raise UsageError unless there is such a recovery, and ``parity`` goes with it."""
    require_one_of("recovery", recovery, ("partial", "full", "exact"))
    if recovery == "exact" and parity is None:
        raise UsageError(
            'recovery="exact" needs parity=Parity(group_size=...), from which it rebuilds lost rows'
        )
    if recovery != "exact" and parity is not None and parity.rebuild_bytes_per_second is not None:
        raise UsageError('rebuild_bytes_per_second= is of use with recovery="exact" only')
    if recovery == "full" and parity is not None:
        raise UsageError('parity= is of no use with recovery="full"')


def contract_of(parity: Parity | None, **options: Any) -> dict[str, str]:
    """Return what all workers of a job must be given alike, by name."""
    of_parity = {} if parity is None else {f"Parity({n}=)": v for n, v in vars(parity).items()}
    given = {"cpr_ext": _version(), "torch": torch.__version__, **options, **of_parity}
    return {name: str(value) for name, value in given.items()}


def require_planned_parity(schedule: Schedule, parity: Parity | None) -> None:
    """Raise UsageError if ``schedule`` plans with parity that the worker does not have."""
    if parity is None and any(plan.parity is not None for plan in _planning(schedule)):
        raise UsageError(
            "TargetPLS(parity=...) saves as rarely as parity in peers' memory allows, but this "
            'Worker has none: give it parity=Parity(...) and recovery="exact", or leave parity= '
            "out of TargetPLS"
        )


def _version() -> str:
    try:
        return version("cpr_ext")
    except PackageNotFoundError:
        return "not installed, run from its source"


def _planning(schedule: Schedule) -> list[TargetPLS]:
    """Return the schedules that plan, of this one and those that it is made of."""
    if isinstance(schedule, TargetPLS):
        return [schedule]
    parts = getattr(schedule, "schedules", ())  # of ``a | b``
    return [planning for part in parts for planning in _planning(part)]


def make_default_checkpointer(model: nn.Module, optimizers: Any, directory: Path) -> Checkpointer:
    """Saves tables that DistributedDataParallel replicates with the dense part, keeps 3 points."""
    tables = find_tables(model, listed(optimizers))
    replicated = data_parallel.replicated_tables(model, tables)
    if replicated:
        logger.info("replicated, so saved as dense: %s", ", ".join(t.name for t in replicated))
    return Checkpointer(
        model,
        optimizers,
        directory,
        tables=[table for table in tables if table not in replicated] if replicated else None,
        store=StoreOptions(retention=Retention(full_recovery_points=3)),
    )


def listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """Return one optimizer, or several, as a list."""
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
