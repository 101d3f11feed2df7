"""``cpr repair``: make a damaged store sound again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from cpr_ext.wings.cli.output import echo, json_option, print_json, store_argument

if TYPE_CHECKING:
    from cpr_ext.wings.tools import maintenance


@click.command()
@store_argument
@click.option("--apply", is_flag=True, help="Do it. Without this nothing is changed.")
@json_option
def repair(store: str, apply: bool, as_json: bool) -> None:
    """Show what is damaged in STORE and what can be rebuilt; with --apply, rebuild it.

    No process may be training on STORE. What is replaced or dropped is kept inside it. Exit 1: the
    store is damaged and not repaired.
    """
    from cpr_ext.wings.tools import maintenance

    report = maintenance.repair(store, apply=apply)
    if as_json:
        print_json(report, is_sound=report.is_sound, is_repairable=report.is_repairable)
    else:
        _show(report)
    if not report.is_sound and not report.is_applied:
        sys.exit(1)


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
