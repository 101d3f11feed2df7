"""``cpr launch``: workers that outlive each other, on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from cpr_ext.wings.cli.numbers import MOST_PROCESSES, Amount


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
    help="How often one worker is started again.",
)
@click.option(
    "--hang-seconds",
    type=Amount(above=0),
    help="Kill, and start again, a worker without a sign of life for so long. Longer than the "
    "workers' time-outs, and than loading takes.  [default: never]",
)
@click.option(
    "--spares",
    type=click.IntRange(0, MOST_PROCESSES),
    default=1,
    show_default=True,
    help="Processes more, which run SCRIPT up to Worker.from_environment() and wait there to "
    "replace a worker that dies, so that nobody waits for imports.",
)
@click.option(
    "--rendezvous",
    metavar="HOST:PORT",
    help="Where `python -m cpr_ext.distributed.rendezvous_host` runs, for several machines; "
    "needs CPR_JOB_SECRET_FILE or CPR_JOB_SECRET, the same for all.  [default: hosted here, on "
    "loopback, with a secret of its own]",
)
@click.option("--world-size", type=click.IntRange(min=1), help="Workers on all machines.")
@click.option(
    "--first-rank",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Rank of the first worker here.",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that gets a file for each worker, worker-00003.log, with what it writes.",
)
@click.option("--job", default="cpr", show_default=True, help="Name of the job at the rendezvous.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(
    nproc: int,
    max_restarts: int,
    hang_seconds: float | None,
    spares: int,
    rendezvous: str | None,
    world_size: int | None,
    first_rank: int,
    log_dir: Path | None,
    job: str,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run a Python SCRIPT in --nproc workers, each supervised on its own.

    A worker that dies is started again and rejoins the others, which keep running; see
    docs/distributed.md. Lines that it writes begin with its rank. ARGUMENTS are handed to the
    script. Ends with 0 once all workers are done.
    """
    from cpr_ext.distributed.launcher import Launcher

    launcher = Launcher(
        command=[sys.executable, script, *arguments],
        num_workers=nproc,
        world_size=world_size,
        first_rank=first_rank,
        rendezvous=rendezvous,
        max_restarts=max_restarts,
        hang_seconds=hang_seconds,
        spares=spares,
        prefixes=True,
        log_dir=log_dir,
        job=job,
        report=lambda text: click.echo(f"cpr launch: {text}", err=True),
    )
    sys.exit(launcher.run())
