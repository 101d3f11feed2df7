"""``cpr publish``: the rows that changed, as files for systems that serve the model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
    from cpr_ext.wings.publishing import PublishReport, StorePosition

_MOST_BYTES = 64 << 20  # of a position


@click.command()
@store_argument
@click.option(
    "--to",
    required=True,
    type=click.Path(file_okay=False),
    help="The publication: a directory, or an address such as s3://bucket/rows.",
)
@click.option(
    "--since",
    "since_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Begin a publication without all rows, after the position in this file (or in a report of "
    "--json).",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["safetensors", "parquet"]),
    default="safetensors",
    show_default=True,
    help="Of rows.",
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
    file_format: Literal["safetensors", "parquet"],
    since_file: Path | None,
    states: bool,
    whole: bool,
    every_seconds: float | None,
    as_json: bool,
) -> None:
    """Write the rows of STORE that changed since the last call, as files that consumers poll.

    The first call writes all rows. STORE may be in use by training.
    """
    from cpr_ext.wings import publishing

    since = None if since_file is None else _position_in(since_file)
    if every_seconds is not None:
        _wait_for(store, every_seconds)
    while True:
        report = publishing.publish(
            store, to, file_format=file_format, states=states, since=since, whole=whole
        )
        print_json(report) if as_json else _show(report)
        if every_seconds is None:
            return
        whole, since = False, None
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


def _position_in(path: Path) -> StorePosition:
    from cpr_ext.errors import DamageError
    from cpr_ext.wings.publishing import StorePosition

    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MOST_BYTES))  # an endless file is cut off
        return StorePosition.from_json(content.get("position", content))
    except (ValueError, AttributeError, DamageError) as error:
        raise click.BadParameter(f"{path} holds no position in a store: {error}") from error


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
