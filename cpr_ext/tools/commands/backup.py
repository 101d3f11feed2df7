"""``cpr backup`` and ``cpr fetch``: copies of a store on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cpr_ext.cli.output import count, echo, json_option, print_json, size, store_argument

if TYPE_CHECKING:
    from cpr_ext.tools.maintenance import CopyReport

_directory = click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))


@click.command()
@store_argument
@_directory
@json_option
def backup(store: str, directory: str, as_json: bool) -> None:
    """Copy the newest committed state of STORE to DIR, which then is a store.

    STORE may be in use by training. If DIR is an earlier state of STORE, only new files are copied,
    and DIR is replaced as a whole. Anything else in DIR is refused.
    """
    from cpr_ext.tools import maintenance

    _show(maintenance.backup(store, directory), as_json)


@click.command()
@click.argument("address", metavar="ADDRESS")
@_directory
@json_option
def fetch(address: str, directory: str, as_json: bool) -> None:
    """Read the newest state at ADDRESS, such as s3://bucket/job, into DIR, which then is a store.

    If DIR is an earlier state of the same store, only what it lacks is read. Anything else in DIR
    is refused.
    """
    from cpr_ext.tools import maintenance

    _show(maintenance.fetch(address, directory), as_json)


def _show(report: CopyReport, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    state = "holds no snapshot" if report.step < 0 else f"step {report.step}"
    before = "" if report.step_before is None else f", before step {report.step_before}"
    echo(
        f"{report.directory}: {state}{before}; {count(report.segments_read, 'file')} of "
        f"{report.segments} read, {size(report.bytes_read)}"
    )
