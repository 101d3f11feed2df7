"""``cpr repair``: make a damaged store sound again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from cpr_ext.wings.cli.output import (
    echo,
    json_option,
    print_json,
    store_argument,
    world_size_option,
)
from cpr_ext.wings.tools.commands.left_alone import show_left_alone

if TYPE_CHECKING:
    from cpr_ext.wings.tools import maintenance


@click.command()
@store_argument
@world_size_option
@click.option("--apply", is_flag=True, help="Do it. Without this nothing is changed.")
@json_option
def repair(store: str, world_size: int | None, apply: bool, as_json: bool) -> None:
    """Show what is damaged in STORE and what can be rebuilt; with --apply, rebuild it.

    No process may be training on STORE. What is replaced or dropped is kept inside it. Exit 1: the
    store is damaged and not repaired.

    STORE may be the directory that holds the stores of all workers of a job. They are repaired one
    after the other; one that is in use is left as it is, and named.
    """
    from cpr_ext.storage.job_stores import find_stores
    from cpr_ext.wings.tools import maintenance

    if not find_stores(store, world_size=world_size).is_one_store:
        job = maintenance.repair_job(store, apply=apply, world_size=world_size)
        if as_json:
            print_json(job)
        else:
            for report in job.stores:
                _show(report)
            show_left_alone(job)
        is_left = any(_is_left_damaged(report) for report in job.stores)
        sys.exit(1 if is_left or job.refused or job.missing else 0)
    report = maintenance.repair(store, apply=apply)
    if as_json:
        print_json(report, is_sound=report.is_sound, is_repairable=report.is_repairable)
    else:
        _show(report)
    if _is_left_damaged(report):
        sys.exit(1)


def _is_left_damaged(report: maintenance.RepairReport) -> bool:
    return not report.is_sound and not report.is_applied


def _show(report: maintenance.RepairReport) -> None:
    said = {
        "damaged": report.damaged,
        "done" if report.is_applied else "to do": report.actions,
        "older": report.older,
        "lost": report.lost,
    }
    for word, sentences in said.items():
        for sentence in sentences:
            echo(f"{word}: {sentence}")
    echo(f"{report.store}: {_verdict(report)}")


def _verdict(report: maintenance.RepairReport) -> str:
    if report.is_sound:
        return "nothing is damaged"
    if not report.is_repairable:
        return (
            "cannot be repaired, nothing was changed; "
            'recover(on_damage="fall_back") takes what is sound'
        )
    if report.is_applied:
        return f"repaired, training resumes from step {report.step}; kept: {report.backup}"
    return f"can be repaired: --apply goes back to step {report.step}"
