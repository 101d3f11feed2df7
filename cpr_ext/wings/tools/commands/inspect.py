"""``cpr inspect``: what a store holds."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cpr_ext.wings.cli.numbers import Amount
from cpr_ext.wings.cli.output import (
    count,
    echo,
    json_option,
    print_json,
    print_table,
    printable,
    size,
    store_argument,
    world_size_option,
)
from cpr_ext.wings.tools.commands.opened_store import open_store

if TYPE_CHECKING:
    from cpr_ext.wings.tools.maintenance import JobSummary, StoreSummary, WorkerSummary
    from cpr_ext.wings.tools.maintenance.inspection import Point


_SECONDS_BETWEEN_LOOKS = 1.0


@click.command()
@store_argument
@world_size_option
@click.option(
    "--follow",
    is_flag=True,
    help="Print it again after each commit of a running job, until Ctrl-C.",
)
@click.option(
    "--late-after",
    type=Amount(above=0),
    metavar="SECONDS",
    help="Exit with 1 if the last commit to a store is older than that.",
)
@json_option
def inspect(
    store: str,
    world_size: int | None,
    follow: bool,
    late_after: float | None,
    as_json: bool,
) -> None:
    """Show the snapshots, tables and sizes of STORE.

    STORE may be the directory that holds the stores of all workers of a job. Then one line per
    store shows its step. Exits 1 if a store is missing or damaged, or the stores are not of one
    job. STORE may also be the address of a copy (s3://...).
    """
    from cpr_ext.errors import UsageError
    from cpr_ext.wings.remote.opening import is_address

    if is_address(store) and (follow or late_after is not None):
        raise UsageError("--follow and --late-after need a store on this machine, not a copy")
    store = open_store(store, headers_only=True)
    is_sound, commits = True, {}
    with suppress(KeyboardInterrupt):
        while True:
            commits = _last_commits(store, world_size)
            is_sound = _print(store, world_size, as_json=as_json)
            while follow and commits == _last_commits(store, world_size):
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            if not follow:
                break
    for path, committed_at in commits.items():
        age = time.time() - committed_at
        if late_after is not None and age > late_after:
            click.echo(printable(f"late: '{path}' was committed to {age:.0f} s ago"), err=True)
            is_sound = False
    sys.exit(0 if is_sound else 1)


def _last_commits(store: str, world_size: int | None) -> dict[Path, float]:
    """Return when each store was committed to, or was made, in seconds since the epoch."""
    from cpr_ext.storage.file_names import MANIFEST_FILE
    from cpr_ext.storage.job_stores import find_stores

    found = {}
    for path in find_stores(store, world_size=world_size).stores:
        manifest = path / MANIFEST_FILE
        found[path] = (manifest if manifest.exists() else path).stat().st_mtime
    return found


def _print(store: str, world_size: int | None, *, as_json: bool) -> bool:
    """Print what a store or the stores of a job hold; False: something is wrong with them."""
    from cpr_ext.storage.job_stores import find_stores
    from cpr_ext.wings.tools import maintenance

    found = find_stores(store, world_size=world_size)
    if not found.is_one_store:
        job = maintenance.inspect_job(store, world_size=world_size)
        print_json(job, is_sound=job.is_sound) if as_json else _show_job(job)
        return job.is_sound
    summary = maintenance.inspect(store)
    print_json(summary) if as_json else _show(summary)
    return True


def _show(summary: StoreSummary) -> None:
    echo(f"{summary.store}: {count(len(summary.tables), 'table')}, {size(summary.file_bytes)}")
    click.echo()
    _show_points(summary)
    _show_rows(summary)
    if not summary.tables:
        click.echo("No table is kept by row: all is in the dense part, as after `cpr import`.\n")
        return
    print_table(
        ("table", "rows", "dim", "dtype", "row state", "size"),
        [
            (
                table.name,
                table.num_embeddings,
                table.embedding_dim,
                table.dtype,
                ", ".join(table.row_states) or "-",
                size(table.num_embeddings * table.row_bytes),
            )
            for table in summary.tables
        ],
    )
    if summary.keys:
        click.echo()
        print_table(
            ("keyed table", "slots", "ids", "evicted since the snapshot before"),
            [
                (each.table, each.slots, each.held, "-" if each.evicted is None else each.evicted)
                for each in summary.keys
            ],
        )


def _show_points(summary: StoreSummary) -> None:
    if not summary.points:
        click.echo("No snapshot was committed as a whole yet.\n")
        return
    rows = [
        (
            point.snapshot,
            point.step,
            point.num_samples,
            "newest" if point is summary.points[-1] else "",
            _kind_of(point),
        )
        for point in summary.points
    ]
    print_table(("snapshot", "step", "samples", "", ""), rows)
    click.echo()


def _show_rows(summary: StoreSummary) -> None:
    newest, rows = summary.points[-1].step if summary.points else 0, summary.rows
    print_table(
        ("segments of rows", "size", "base step", "newest step", "behind"),
        [
            (
                rows.segments,
                size(rows.file_bytes),
                rows.base_step if rows.base_step >= 0 else "-",
                rows.newest_step if rows.newest_step >= 0 else "-",
                max(0, newest - rows.newest_step) if rows.newest_step >= 0 else "-",
            )
        ],
    )
    click.echo()


def _kind_of(point: Point) -> str:
    kind = "full-recovery point" if point.is_full_recovery_point else ""
    if point.is_rounded is False:
        return kind
    rounded = "rounded rows" if point.is_rounded else "a header is damaged"
    return f"{kind}, {rounded}" if kind else rounded


def _show_job(job: JobSummary) -> None:
    echo(f"{job.job}: {count(len(job.workers), 'worker')}, {size(job.file_bytes)}")
    click.echo()
    steps = [w.summary.points[-1].step for w in job.workers if w.summary and w.summary.points]
    print_table(
        ("worker", "size", "step", "samples", "behind", "full-recovery points at"),
        [_worker_row(worker, max(steps, default=0)) for worker in job.workers],
    )
    click.echo()
    for worker in job.workers:
        if worker.summary is None:
            echo(f"damaged: {worker.damage}")
    for fault in job.faults:
        echo(f"wrong: {fault}")
    for note in job.notes:
        echo(f"note: {note}")


def _worker_row(worker: WorkerSummary, newest: int) -> tuple[object, ...]:
    if (summary := worker.summary) is None:
        return (worker.worker, *("-",) * 4, "damaged")
    shown = (worker.worker, size(summary.file_bytes))
    if not summary.points:
        return (*shown, "-", "-", "-", "-")
    point = summary.points[-1]
    full = ", ".join(str(p.step) for p in summary.points if p.is_full_recovery_point)
    return (
        *shown,
        *(point.step, point.num_samples, newest - point.step),
        full or "-",
    )
