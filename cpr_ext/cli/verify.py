"""``cpr verify``: read and check every byte."""

from __future__ import annotations

import sys

import click

from cpr_ext.cli.output import ByteBar, count, echo, json_option, print_json, size, store_argument


@click.command()
@store_argument
@click.option("--quiet", is_flag=True, help="No progress bar.")
@json_option
def verify(store: str, quiet: bool, as_json: bool) -> None:
    """Read and check every byte of STORE; exit 1 and the names of what is damaged."""
    from cpr_ext import maintenance

    bar = ByteBar(disable=quiet)
    try:
        report = maintenance.verify(store, on_progress=bar.show)
    finally:
        bar.close()
    if as_json:
        print_json(report, is_sound=report.is_sound)
    else:
        for damage in report.damaged:
            echo(f"damaged: {damage.path}: {damage.reason}")
        for path in report.left_overs:
            echo(f"left over, harmless: {path}")
        what = "no damage" if report.is_sound else f"{count(len(report.damaged), 'file')} damaged"
        read = f"{count(report.files_checked, 'file')}, {size(report.bytes_checked)}"
        echo(f"{store}: {what}; checked {read}")
    if not report.is_sound:
        sys.exit(1)
