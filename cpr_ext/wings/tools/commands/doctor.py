"""``cpr doctor``: whether this machine and its packages fit."""

from __future__ import annotations

import sys

import click

from cpr_ext.wings.cli.output import echo, json_option, print_json


@click.command()
@click.argument("folder", type=click.Path(file_okay=False), default=".")
@json_option
def doctor(folder: str, as_json: bool) -> None:
    """Check versions, build, CUDA, the disk of FOLDER, and optional packages.

    Each line shows what was found: ok, a note (something optional is missing), or wrong. A
    remedy follows what is not ok. Exits 1 if something is wrong.
    """
    from cpr_ext.wings.tools.doctor import diagnose

    found = diagnose(folder)
    if as_json:
        print_json(found, is_sound=found.is_sound)
    else:
        for check in found.checks:
            echo(f"{check.status:<6}{check.name:<15}{check.found}")
            if check.remedy:
                echo(f"{'':<21}-> {check.remedy}")
        wrong = sum(check.status == "wrong" for check in found.checks)
        click.echo("\nNothing is wrong." if wrong == 0 else f"\n{wrong} of these are wrong.")
    if not found.is_sound:
        sys.exit(1)
