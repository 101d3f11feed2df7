"""``cpr verify``: read and check every byte."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from cpr_ext.wings.cli.output import (
    Bar,
    count,
    echo,
    json_option,
    print_json,
    size,
    store_argument,
    world_size_option,
)
from cpr_ext.wings.tools.commands.opened_store import open_store

if TYPE_CHECKING:
    from cpr_ext.wings.tools.maintenance import JobVerifyReport, VerifyReport


@click.command()
@store_argument
@world_size_option
@click.option("--quiet", is_flag=True, help="No progress bar.")
@json_option
def verify(store: str, world_size: int | None, quiet: bool, as_json: bool) -> None:
    """Read and check every byte of STORE; exit 1 and the names of what is damaged.

    STORE may be the directory that holds the stores of all workers of a job. Then all are checked,
    and whether they fit together: no worker's store is missing, parts make up whole tables, dense
    parts are of one model. STORE may also be the address of a copy (s3://...).
    """
    from cpr_ext.storage.job_stores import find_stores
    from cpr_ext.wings.tools import maintenance

    store = open_store(store)
    report: VerifyReport | JobVerifyReport
    with Bar("B", is_shown=False if quiet else None) as bar:
        if find_stores(store, world_size=world_size).is_one_store:
            report = maintenance.verify(store, on_progress=bar.show)
        else:
            report = maintenance.verify_job(store, world_size=world_size, on_progress=bar.show)
    if as_json:
        print_json(report, is_sound=report.is_sound)
    elif isinstance(report, maintenance.VerifyReport):
        _show(report)
    else:
        _show_job(report)
    if not report.is_sound:
        sys.exit(1)


def _show(report: VerifyReport) -> None:
    for damage in report.damaged:
        echo(f"damaged: {damage.path}: {damage.reason}")
    for path in report.left_overs:
        echo(f"left over, harmless: {path}")
    what = "no damage" if report.is_sound else f"{count(len(report.damaged), 'file')} damaged"
    read = f"{count(report.files_checked, 'file')}, {size(report.bytes_checked)}"
    echo(f"{report.store}: {what}; checked {read}")


def _show_job(report: JobVerifyReport) -> None:
    for store in report.stores:
        _show(store)
    for fault in report.faults:
        echo(f"wrong: {fault}")
    for note in report.notes:
        echo(f"note: {note}")
    damaged = sum(not store.is_sound for store in report.stores)
    if report.is_sound:
        what = "no damage, and they fit together"
    else:
        what = f"{damaged} damaged, {count(len(report.faults), 'fault')} between them"
    echo(f"{report.job}: {count(len(report.stores), 'store')}: {what}")
