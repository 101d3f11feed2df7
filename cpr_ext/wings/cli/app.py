"""The command group, and what becomes of errors."""

from __future__ import annotations

import importlib.util
import sys

import click

from cpr_ext.errors import CprError, UsageError
from cpr_ext.runtime.log_text import hide_foreign_warnings
from cpr_ext.wings.cli.output import printable


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="cpr_ext")
def app() -> None:
    """Cheap fault tolerance for recommendation-model training."""


#: Where commands are; the library works without these folders.
WINGS = ("cpr_ext.wings.tools", "cpr_ext.wings.lab")
for wing in WINGS:
    if importlib.util.find_spec(wing) is not None:
        for command in importlib.import_module(f"{wing}.commands").COMMANDS:
            app.add_command(command)


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
