"""``cpr fetch``: the copy of a store in object storage, read back onto this machine."""

from __future__ import annotations

import click

from cpr_ext.wings.cli.output import count, echo, json_option, print_json, size


@click.command()
@click.argument("address", metavar="ADDRESS")
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@json_option
def fetch(address: str, directory: str, as_json: bool) -> None:
    """Read the newest state at ADDRESS, such as s3://bucket/job, into DIR, which then is a store.

    DIR must be empty or missing.
    """
    from cpr_ext.wings.tools import maintenance

    report = maintenance.fetch(address, directory)
    if as_json:
        print_json(report)
        return
    state = "holds no snapshot" if report.step < 0 else f"step {report.step}"
    files = count(report.segments, "file")
    echo(f"{report.directory}: {state}; {files} read, {size(report.bytes_read)}")
