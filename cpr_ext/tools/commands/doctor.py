"""``cpr doctor``: whether this machine and its packages fit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from cpr_ext.cli.numbers import Amount
from cpr_ext.cli.output import echo, json_option, print_json, to_json

if TYPE_CHECKING:
    from cpr_ext.tools.doctor import Check


@click.command()
@click.argument("folder", type=click.Path(file_okay=False), default=".")
@click.option(
    "--size-mb",
    type=Amount(8),
    default=64,
    show_default=True,
    help="Bytes to write to FOLDER and read again (MB: 10^6).",
)
@click.option(
    "--options",
    "options_file",
    type=click.Path(dir_okay=False),
    help="A TOML file of Checkpointer's options: show them, and where each comes from.",
)
@json_option
def doctor(folder: str, size_mb: float, options_file: str | None, as_json: bool) -> None:
    """Check versions, build, CPU, CUDA, the disk of FOLDER, and optional packages.

    Each line shows what was found: ok, a note (something optional is missing or slow), or wrong. A
    remedy follows what is not ok. Exits 1 if something is wrong. With --options, nothing else is
    done; variables such as CPR_NUM_SHARDS take precedence over the file.
    """
    from cpr_ext.tools.doctor import diagnose

    if options_file is not None:
        _show_options(options_file, as_json=as_json)
        return

    def show_progress(name: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"checking: {name} ...", err=True)

    found = diagnose(folder, probe_bytes=int(size_mb * 1e6), progress=show_progress)
    if as_json:
        print_json(found, is_sound=found.is_sound)
    else:
        for check in found.checks:
            _show(check)
        wrong = sum(check.status == "wrong" for check in found.checks)
        click.echo("\nNothing is wrong." if wrong == 0 else f"\n{wrong} of these are wrong.")
    if not found.is_sound:
        sys.exit(1)


def _show_options(path: str, *, as_json: bool) -> None:
    from cpr_ext import CheckpointerOptions

    loaded = CheckpointerOptions.load(path)
    values = {name: getattr(loaded, name) for name in loaded.sources}
    if as_json:
        shown = {
            name: {"value": repr(value), "source": loaded.sources[name]}
            for name, value in values.items()
        }
        click.echo(to_json(shown))
        return
    for name, value in values.items():
        echo(f"{name:<18}{value!r}  [{loaded.sources[name]}]")


def _show(check: Check) -> None:
    echo(f"{check.status:<6}{check.name:<15}{check.found}")
    if check.remedy:
        echo(f"{'':<21}-> {check.remedy}")
