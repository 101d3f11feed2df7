"""What the stores of a whole job hold, and whether they are what they should be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from cpr_ext.errors import StoreError
from cpr_ext.storage.job_stores import JobStores, find_stores
from cpr_ext.storage.store_reader import StoreReader, read_committed_all
from cpr_ext.wings.tools.maintenance import job_fit
from cpr_ext.wings.tools.maintenance.inspection import StoreSummary, inspect
from cpr_ext.wings.tools.maintenance.verification import Damage, OnProgress, VerifyReport, verify
from cpr_ext.wings.tools.maintenance.whole_tables import Member, TablePlan, plan_tables

Stores = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class WorkerSummary:
    """The store of one worker.

    Attributes:
        worker: its rank, or the name of its store.
        summary: what it holds; None: it cannot be read, because of ``damage``.
    """

    worker: int | str
    store: str
    summary: StoreSummary | None
    damage: str = ""


@dataclass(frozen=True)
class JobSummary:
    """What the stores of a job hold.

    Attributes:
        workers: by rank or name.
        faults: why they are not one whole job, one sentence each; empty: nothing was found.
        notes: what else must be known, one sentence each.
        file_bytes: of all live segments.
    """

    job: str
    workers: tuple[WorkerSummary, ...]
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    file_bytes: int

    @property
    def is_sound(self) -> bool:
        """True if no store is damaged or missing, and the tables are whole."""
        return not self.faults and all(worker.summary is not None for worker in self.workers)


def inspect_job(job: Stores, *, world_size: int | None = None) -> JobSummary:
    """Summarise the stores of a job; reads manifests and headers only.

    Args:
        job: the directory that holds the stores of all workers, or these one by one.
        world_size: of a directory with jobs of several sizes, the one of so many workers.

    Raises:
        StoreError: there is no store, or there are those of several jobs.
        StorageError: the operating system refused to read.
    """
    found = find_stores(job, world_size=world_size)
    workers = tuple(
        _inspect(worker, store)
        for worker, store in zip(found.workers, map(str, found.stores), strict=True)
    )
    faults, notes = _membership(found)
    summaries = {each.worker: each.summary for each in workers if each.summary is not None}
    if len(summaries) == len(workers):
        plan = plan_tables([StoreReader(store).tables for store in found.stores], found.workers)
        faults += plan.faults
        notes += _unplaced(plan)
    else:
        notes.append("whether the tables are whole was not looked at, as a store cannot be read")
    notes += [_EMPTY.format(worker) for worker, held in summaries.items() if not held.points]
    notes += job_fit.several_steps({w: s.points[-1].step for w, s in summaries.items() if s.points})
    file_bytes = sum(summary.file_bytes for summary in summaries.values())
    return JobSummary(str(found.directory), workers, tuple(faults), tuple(notes), file_bytes)


_EMPTY = "worker {} holds no snapshot yet"


@dataclass
class JobVerifyReport:
    """What a verification of a job found.

    Attributes:
        stores: of each worker's store.
        faults: why they are not one whole job, one sentence each.
        notes: what is no damage, but must be known, one sentence each.
    """

    job: str
    stores: list[VerifyReport] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """True if no store is damaged, and they fit together."""
        return not self.faults and all(store.is_sound for store in self.stores)


def verify_job(
    job: Stores,
    *,
    world_size: int | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> JobVerifyReport:
    """Check every byte of every worker's store, and that the stores fit together.

    That is: no worker's store is missing, the parts make up whole tables, and dense parts are of
    one model. A store of another run of the same job and plan fits as well; only its step, samples
    and values may differ, see ``notes``.

    Args:
        job: the directory that holds the stores of all workers, or these one by one; processes may
            be training on them.
        world_size: of a directory with jobs of several sizes, the one of so many workers.
        on_progress: called with bytes checked and bytes in all of one store after the other.

    Raises:
        StoreError: there is no store, or there are those of several jobs.
        StorageError: the operating system refused to read.
    """
    found = find_stores(job, world_size=world_size)
    report = JobVerifyReport(str(found.directory))
    report.faults, report.notes = _membership(found)
    for store in found.stores:
        try:
            report.stores.append(verify(store, on_progress=on_progress))
        except StoreError as error:
            report.stores.append(VerifyReport(str(store), damaged=[Damage(str(store), str(error))]))
    if all(store.is_sound for store in report.stores):
        faults, notes = read_committed_all(found.stores, lambda readers: _fit(found, readers))
        report.faults += faults
        report.notes += notes
    else:
        report.notes.append("whether the stores fit together was not looked at, as one is damaged")
    return report


def _fit(found: JobStores, readers: Sequence[StoreReader]) -> tuple[list[str], list[str]]:
    plan = plan_tables([reader.tables for reader in readers], found.workers)
    faults, notes = [*plan.faults], _unplaced(plan)
    members = []
    for worker, reader in zip(found.workers, readers, strict=True):
        if reader.manifest.dense:
            members.append(Member(worker, reader, reader.newest()))
        else:
            notes.append(_EMPTY.format(worker))
    if members:
        parts = job_fit.read_parts(members)
        faults += job_fit.dense_faults(parts)
        notes += job_fit.notes(parts)
    return faults, notes


def _membership(found: JobStores) -> tuple[list[str], list[str]]:
    faults = [f"{name} is missing" for name in found.missing]
    notes = [f"{name} is a store, but not of a worker; it is ignored" for name in found.others]
    return faults, notes


def _unplaced(plan: TablePlan) -> list[str]:
    return [
        f"table '{name}' is in {number} stores, which do not say which part of it each holds: "
        "whether it is whole cannot be seen"
        for name, number in plan.unplaced.items()
    ]


def _inspect(worker: int | str, store: str) -> WorkerSummary:
    try:
        return WorkerSummary(worker, store, inspect(store))
    except StoreError as error:
        return WorkerSummary(worker, store, None, str(error))
