"""``cpr prove``: does a training script resume in every bit?"""

from __future__ import annotations

import sys

import click

from cpr_ext.wings.cli.numbers import MOST_PROCESSES
from cpr_ext.wings.cli.output import echo, json_option, print_json

_EPILOG = """\b
Examples:
  cpr prove train.py
  cpr prove --steps 10 train.py --epochs 1
  cpr prove --nproc 2 two_workers.py

\b
It finds what is not saved, names it, and says what to change:
  - the position of a reader, or a generator of its own
  - a scheduler that steps after the snapshot, or is not given
  - an optimizer inside another one, a second model, an average of weights
  - any other variable of the loop that a new process has otherwise

A difference in a variable that does not matter: --ignore NAME. The same from Python, for your
tests: cpr_ext.prove("train.py")."""


@click.command(
    epilog=_EPILOG,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--steps", type=click.IntRange(min=2), default=6, show_default=True, help="Steps to train."
)
@click.option(
    "--nproc",
    type=click.IntRange(1, MOST_PROCESSES),
    default=1,
    show_default=True,
    help="Workers of a job with cpr_ext.distributed.Worker, all of which are killed.",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="NAME",
    help="A variable that may differ, or a part of its name; may be repeated.",
)
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False),
    help="Where stores are meanwhile; they need room for the tables.  [default: temporary files]",
)
@json_option
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def prove(
    steps: int,
    nproc: int,
    ignore: tuple[str, ...],
    directory: str | None,
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Kill a training SCRIPT after each step, recover, and compare every bit.

    SCRIPT runs as it is for a few steps, without a kill. Then it runs again: it is killed after
    each step, and a new process recovers and trains the next one. The model, optimizers,
    generators, inputs, losses and the loop's variables must be equal. Stores of the script are not
    touched. Exits with 1 if anything differs.
    """
    from cpr_ext.wings.proving import prove as proofs
    from cpr_ext.wings.tools.worker_proofs import prove_workers

    def report(text: str) -> None:
        click.echo(f"cpr prove: {text}", err=True)

    if nproc > 1:
        proof = prove_workers(
            script, arguments, nproc, steps=steps, directory=directory, ignore=ignore, report=report
        )
    else:
        proof = proofs.prove(
            script, arguments, steps=steps, directory=directory, ignore=ignore, report=report
        )
    if as_json:
        print_json(proof, is_proven=proof.is_proven)
    else:
        for line in str(proof).splitlines():
            echo(line)
    if not proof.is_proven:
        sys.exit(1)
