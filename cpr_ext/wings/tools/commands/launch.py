"""``cpr launch``: workers that outlive each other, on this machine."""

from __future__ import annotations

import sys

import click

from cpr_ext.wings.cli.numbers import MOST_PROCESSES


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--nproc",
    type=click.IntRange(1, MOST_PROCESSES),
    required=True,
    help="Workers on this machine.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="How often an agent starts its worker again.",
)
@click.option(
    "--spares",
    type=click.IntRange(0, MOST_PROCESSES),
    default=1,
    show_default=True,
    help="Agents more, whose workers run SCRIPT up to Worker.from_environment() and wait there to "
    "replace a worker that dies, so that nobody waits for imports.",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(
    nproc: int, max_restarts: int, spares: int, script: str, arguments: tuple[str, ...]
) -> None:
    """Run a Python SCRIPT in --nproc workers, each under an agent of torchrun.

    A worker that dies is replaced and rejoins the others, which keep running; see
    docs/distributed.md. ARGUMENTS are handed to the script. Ends with 0 once all workers are done.
    Several machines: torchrun --rdzv-backend=cpr.
    """
    from cpr_ext.distributed.launcher import launch as start

    command = [sys.executable, script, *arguments]
    sys.exit(
        start(
            command,
            nproc,
            spares=spares,
            max_restarts=max_restarts,
            report=lambda text: click.echo(f"cpr launch: {text}", err=True),
        )
    )
