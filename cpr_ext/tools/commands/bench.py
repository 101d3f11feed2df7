"""``cpr bench``: is this machine and disk fast enough?"""

from __future__ import annotations

import sys

import click

from cpr_ext.cli.numbers import Amount
from cpr_ext.cli.output import json_option, print_json, size


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False), default=".")
@click.option(
    "--size-mb",
    type=Amount(2),
    default=512,
    show_default=True,
    help="Write and read so much (MB: 10^6 bytes); it is removed again.",
)
@click.option(
    "--model-gb",
    type=Amount(above=0),
    default=10,
    show_default=True,
    help="Judge for tables of so many GB (10^9 bytes), optimizer state included.",
)
@click.option(
    "--fraction",
    type=Amount(above=0, most=1),
    default=0.125,
    show_default=True,
    help="Share of the rows in a partial snapshot.",
)
@click.option(
    "--every-seconds",
    type=Amount(above=0),
    default=60,
    show_default=True,
    help="Time between two snapshots.",
)
@json_option
def bench(
    folder: str,
    size_mb: float,
    model_gb: float,
    fraction: float,
    every_seconds: float,
    as_json: bool,
) -> None:
    """Measure how fast a store in FOLDER is saved and recovered on this machine.

    Writes --size-mb to FOLDER (default: here), twice, and removes it. Then says what a model of
    --model-gb would cost, and what to change if the set-up does not suit it.
    """
    from cpr_ext.tools.maintenance.self_check import self_check

    def tell(what: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"measuring: {what} ...", err=True)

    found = self_check(
        folder,
        probe_bytes=int(size_mb * 1e6),
        model_bytes=int(model_gb * 1e9),
        fraction=fraction,
        every_seconds=every_seconds,
        progress=tell,
    )
    if as_json:
        print_json(found)
        return
    lines = [
        ("direct I/O", "yes" if found.direct_io else "no"),
        ("plain write, synced", f"{size(found.raw_write)}/s"),
        ("plain read", f"{size(found.raw_read)}/s"),
        ("save, checksums", f"{size(found.save)}/s, {found.save / found.raw_write:.2f}x plain"),
        (
            "recover, verified",
            f"{size(found.recover)}/s, {found.recover / found.raw_read:.2f}x plain",
        ),
        ("count a batch", f"{1e3 * found.count_seconds:.2f} ms for 26 x 2048 lookups"),
        ("longest pause", f"{1e3 * found.longest_pause_seconds:.1f} ms while a base was captured"),
    ]
    for name, text in lines:
        click.echo(f"{name:<21}{text}")
    click.echo(
        f"\nTables of {size(found.model_bytes)}, {100 * fraction:g} % of the rows every "
        f"{every_seconds:g} s: a partial snapshot of {size(found.snapshot_bytes)} takes "
        f"{found.snapshot_seconds:.1f} s in the background, a base {found.base_seconds:.1f} s, "
        f"recovery {found.recover_seconds:.1f} s."
    )
    for sentence in found.advice:
        click.echo(f"- {sentence}")
    if not found.advice:
        click.echo("This set-up is sound for it.")
