"""Repair the stores of a job, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from cpr_ext.errors import StorageError, StoreError
from cpr_ext.storage.job_stores import find_stores
from cpr_ext.wings.tools.maintenance.job_inspection import Stores
from cpr_ext.wings.tools.maintenance.repair import RepairReport, repair
from cpr_ext.wings.tools.maintenance.verification import Damage

R = TypeVar("R")


@dataclass
class JobReport(Generic[R]):
    """What was done to the stores of a job, each by itself.

    Attributes:
        stores: what was done, to those that could be used.
        refused: stores that were left as they are, and why: in use, damaged, unreadable.
        missing: stores of workers that are not there.
    """

    job: str
    stores: list[R] = field(default_factory=list)
    refused: list[Damage] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def repair_job(
    job: Stores, *, apply: bool = False, world_size: int | None = None
) -> JobReport[RepairReport]:
    """Repair each store in turn, see :func:`repair`; one in use is left as it is.

    Args:
        job: the directory that holds the stores of all workers, or these one by one.
        apply: False reads only.
        world_size: of a directory with jobs of several sizes, the one of so many workers.

    Raises:
        StoreError: there is no store, or there are those of several jobs.
    """
    return _each(job, world_size, lambda store: repair(store, apply=apply))


def _each(job: Stores, world_size: int | None, act: Callable[[Path], R]) -> JobReport[R]:
    found = find_stores(job, world_size=world_size)
    report: JobReport[R] = JobReport(str(found.directory), missing=list(found.missing))
    for store in found.stores:
        try:
            report.stores.append(act(store))
        except (StoreError, StorageError) as error:
            report.refused.append(Damage(str(store), str(error)))
    return report
