"""The command group, and what becomes of errors."""

from __future__ import annotations

import sys

import click

from cpr_ext.cli.backup import backup, fetch
from cpr_ext.cli.bench import bench
from cpr_ext.cli.compact import compact
from cpr_ext.cli.doctor import doctor
from cpr_ext.cli.emulate import emulate
from cpr_ext.cli.export import export
from cpr_ext.cli.inspect import inspect
from cpr_ext.cli.launch import launch
from cpr_ext.cli.output import printable
from cpr_ext.cli.plan import plan
from cpr_ext.cli.prove import prove
from cpr_ext.cli.publish import publish
from cpr_ext.cli.repair import repair
from cpr_ext.cli.report import report
from cpr_ext.cli.train import train
from cpr_ext.cli.verify import verify
from cpr_ext.errors import CprError, UsageError
from cpr_ext.runtime.foreign_warnings import hide_foreign_warnings


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="cpr_ext")
def app() -> None:
    """Cheap fault tolerance for recommendation-model training."""


for command in (
    *(train, prove, launch, plan, emulate, report, inspect, verify),
    *(repair, backup, fetch, export, publish, compact, bench),
):
    app.add_command(command)
app.add_command(doctor)


def run() -> None:
    """Run the command; an error of ours becomes one line on stderr, never a traceback."""
    hide_foreign_warnings()
    try:
        app(prog_name="cpr")
    except UsageError as error:
        _print_error(error)
        sys.exit(2)
    except (CprError, OSError, MemoryError) as error:
        _print_error(error)
        sys.exit(1)


def _print_error(error: BaseException) -> None:
    text = str(error) or type(error).__name__
    click.echo(printable(f"Error: {text}", keep="\n"), err=True)
