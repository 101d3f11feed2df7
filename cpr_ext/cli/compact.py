"""``cpr compact``: merge base and partial segments."""

from __future__ import annotations

import click

from cpr_ext.cli.output import count, echo, json_option, print_json, size, store_argument


@click.command()
@store_argument
@click.option(
    "--mb-per-second",
    type=click.FloatRange(min=0, min_open=True),
    help="Read and write no more than this, together (MB: 10^6 bytes).",
)
@click.option(
    "--memory-mb",
    type=click.FloatRange(min=1),
    default=64,
    show_default=True,
    help="Rows held in memory at a time.",
)
@json_option
def compact(store: str, mb_per_second: float | None, memory_mb: float, as_json: bool) -> None:
    """Merge the segments of each shard of STORE, on which no process may be training.

    Every recovery point stays: the newest snapshot, and full-recovery points.
    """
    from cpr_ext import maintenance

    limits = maintenance.MergeLimits(
        block_bytes=int(memory_mb * 1e6),
        bytes_per_second=None if mb_per_second is None else mb_per_second * 1e6,
    )
    report = maintenance.compact(store, limits=limits)
    if as_json:
        print_json(report)
        return
    before = f"{count(report.segments_before, 'segment')} of {size(report.bytes_before)}"
    after = f"{count(report.segments_after, 'segment')} of {size(report.bytes_after)}"
    what = f"{before} became {after}" if report.shards_compacted else "nothing to merge"
    echo(f"{store}: {what}")
