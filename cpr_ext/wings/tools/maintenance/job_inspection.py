"""What the stores of a whole job hold, and whether they are what they should be."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from cpr_ext.errors import StorageError, StoreError
from cpr_ext.state.dtypes import DTYPE_NAMES
from cpr_ext.storage.job_stores import JobStores, find_stores
from cpr_ext.storage.manifest import StoredTable
from cpr_ext.storage.store_reader import StoreReader, read_committed_all
from cpr_ext.wings.tools.maintenance import job_fit
from cpr_ext.wings.tools.maintenance.inspection import StoreSummary, TableSummary, inspect
from cpr_ext.wings.tools.maintenance.repair import RepairReport, repair
from cpr_ext.wings.tools.maintenance.verification import Damage, OnProgress, VerifyReport, verify
from cpr_ext.wings.tools.maintenance.whole_tables import Holding, Member, TablePlan, plan_tables

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
class JobTable:
    """A table that the workers hold together.

    Attributes:
        parts: how many parts there are; 1: it is whole on one worker.
        is_placed: the stores record which part each holds; False: they do not, and
            ``num_embeddings`` is the sum of their rows.
        row_states: as of the first part.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: str
    parts: int
    is_placed: bool
    row_states: tuple[str, ...]
    size_bytes: int


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
    tables: tuple[JobTable, ...]
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
    summaries = [worker.summary for worker in workers if worker.summary is not None]
    faults, notes = _membership(found)
    tables: tuple[JobTable, ...] = ()
    if len(summaries) == len(workers):
        identities = [StoreReader(store).tables for store in found.stores]
        plan = plan_tables(identities, found.workers)
        faults += plan.faults
        notes += _unplaced(plan)
        tables = _tables(plan, identities, summaries)
    else:
        notes.append("whether the tables are whole was not looked at, as a store cannot be read")
    steps = {worker.worker: _newest_step(worker.summary) for worker in workers if worker.summary}
    notes += _of_several_steps(steps)
    return JobSummary(
        str(found.directory),
        workers,
        tables,
        tuple(faults),
        tuple(notes),
        sum(summary.file_bytes for summary in summaries),
    )


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
    on_progress: Callable[[int], OnProgress] = lambda store: lambda done, total: None,
) -> JobVerifyReport:
    """Check every byte of every worker's store, and that the stores fit together.

    That is: no worker's store is missing, the parts make up whole tables, and dense parts are of
    one model. A store of another run of the same job and plan fits as well; only its step, samples
    and values may differ, see ``notes``.

    Args:
        job: the directory that holds the stores of all workers, or these one by one; processes may
            be training on them.
        world_size: of a directory with jobs of several sizes, the one of so many workers.
        on_progress: gives what to call with bytes checked and bytes in all of a store, by number.

    Raises:
        StoreError: there is no store, or there are those of several jobs.
        StorageError: the operating system refused to read.
    """
    found = find_stores(job, world_size=world_size)
    report = JobVerifyReport(str(found.directory))
    report.faults, report.notes = _membership(found)
    for number, store in enumerate(found.stores):
        try:
            report.stores.append(verify(store, on_progress=on_progress(number)))
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
            notes.append(f"worker {worker} holds no snapshot yet")
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


def _newest_step(summary: StoreSummary) -> int | None:
    return summary.points[-1].step if summary.points else None


def _of_several_steps(steps: Mapping[int | str, int | None]) -> list[str]:
    empty = [f"worker {worker} holds no snapshot yet" for worker, at in steps.items() if at is None]
    if len({step for step in steps.values() if step is not None}) < 2:
        return empty
    return [*empty, "the newest snapshots are of different steps, as partial recovery allows"]


def _tables(
    plan: TablePlan,
    identities: Sequence[Mapping[str, StoredTable]],
    summaries: Sequence[StoreSummary],
) -> tuple[JobTable, ...]:
    of_store = [{table.name: table for table in summary.tables} for summary in summaries]
    found = [
        _table(name, [of_store[h.member][h.name] for h in holdings], holdings)
        for name, holdings in plan.tables.items()
    ]
    for name in plan.unplaced:
        held = [tables[name] for tables in of_store if name in tables]
        found.append(_table(name, held, None))
    return tuple(sorted(found, key=lambda table: table.name))


def _table(name: str, held: Sequence[TableSummary], holdings: Sequence[Holding] | None) -> JobTable:
    if holdings is not None:
        part, dtype = holdings[0].part, DTYPE_NAMES[holdings[0].dtype]
        num_rows, dim = part.num_embeddings, part.embedding_dim
    else:
        num_rows, dim = sum(table.num_embeddings for table in held), held[0].embedding_dim
        dtype = held[0].dtype
    return JobTable(
        *(name, num_rows, dim, dtype, len(held), holdings is not None, held[0].row_states),
        sum(table.num_embeddings * table.row_bytes for table in held),
    )


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
