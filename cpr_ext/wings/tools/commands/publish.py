"""``cpr publish``: the rows that changed, as files for systems that serve the model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cpr_ext.wings.cli.numbers import Amount
from cpr_ext.wings.cli.output import (
    count,
    echo,
    json_option,
    print_json,
    printable,
    size,
    store_argument,
)

if TYPE_CHECKING:
    from cpr_ext.wings.publishing import PublishReport


@click.command()
@store_argument
@click.option(
    "--to",
    required=True,
    type=click.Path(file_okay=False),
    help="The publication: a directory, or an address such as s3://bucket/rows.",
)
@click.option("--states", is_flag=True, help="Write per-row optimizer states, too.")
@click.option("--whole", is_flag=True, help="Write all rows now, for new consumers.")
@click.option(
    "--every",
    "every_seconds",
    type=Amount(above=0),
    help="Publish again and again, so many seconds apart, until Ctrl-C.",
)
@json_option
def publish(
    store: str,
    to: str,
    states: bool,
    whole: bool,
    every_seconds: float | None,
    as_json: bool,
) -> None:
    """Write the rows of STORE that changed since the last call, as files that consumers poll.

    The first call writes all rows. STORE may be in use by training.
    """
    from cpr_ext.wings import publishing

    if every_seconds is not None:
        _wait_for(store, every_seconds)
    while True:
        report = publishing.publish(store, to, states=states, whole=whole)
        print_json(report) if as_json else _show(report)
        if every_seconds is None:
            return
        whole = False
        time.sleep(every_seconds)


def _wait_for(store: str, every_seconds: float) -> None:
    """Wait until training has committed a first snapshot; a store in object storage has one."""
    from cpr_ext.wings.remote.opening import is_address

    has_said = False
    while not is_address(store) and not _has_snapshot(Path(store)):
        if not has_said:
            click.echo(printable(f"'{store}' has no snapshot yet: waiting for one"), err=True)
            has_said = True
        time.sleep(every_seconds)


def _has_snapshot(store: Path) -> bool:
    from cpr_ext.storage.file_names import SEGMENTS_DIRECTORY

    return any((store / SEGMENTS_DIRECTORY).glob("*-dense.safetensors"))


def _show(report: PublishReport) -> None:
    state = f"state {report.number}, step {report.step}"
    if not report.file_bytes:
        echo(f"{report.directory}: {state}: nothing was committed since")
        return
    kind = ", all rows for new consumers too" if report.wrote_whole else ""
    echo(
        f"{report.directory}: {state}: {count(report.rows, 'row')}, {size(report.file_bytes)}{kind}"
    )
    if report.is_copy:
        echo("note: all rows were written")
