"""``cpr publish``: the rows that changed, as files for systems that serve the model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

import click

from cpr_ext.cli.output import count, echo, json_option, print_json, size, store_argument

if TYPE_CHECKING:
    from cpr_ext.publishing import PublishReport


@click.command()
@store_argument
@click.option("--to", required=True, type=click.Path(file_okay=False), help="The publication.")
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
    type=click.FloatRange(min=0, min_open=True),
    help="Publish again and again, so many seconds apart, until Ctrl-C.",
)
@json_option
def publish(
    store: str,
    to: str,
    file_format: Literal["safetensors", "parquet"],
    states: bool,
    whole: bool,
    every_seconds: float | None,
    as_json: bool,
) -> None:
    """Write the rows of STORE that changed since the last call, as files that consumers poll.

    The first call writes all rows. STORE may be in use by training.
    """
    from cpr_ext import publishing

    while True:
        report = publishing.publish(store, to, file_format=file_format, states=states, whole=whole)
        print_json(report) if as_json else _show(report)
        if every_seconds is None:
            return
        whole = False
        time.sleep(every_seconds)


def _show(report: PublishReport) -> None:
    state = f"state {report.number}, step {report.step}"
    if not report.file_bytes:
        echo(f"{report.directory}: {state}: nothing was committed since")
        return
    kind = ", all rows for new consumers too" if report.wrote_whole else ""
    echo(
        f"{report.directory}: {state}: {count(report.rows, 'row')}, {size(report.file_bytes)}{kind}"
    )
    if report.copied_shards:
        echo(f"note: all rows of {count(len(report.copied_shards), 'shard')} were written")
