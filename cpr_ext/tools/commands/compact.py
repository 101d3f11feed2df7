"""``cpr compact``: merge base and partial segments."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from cpr_ext.cli.numbers import Amount
from cpr_ext.cli.output import (
    count,
    echo,
    json_option,
    print_json,
    size,
    store_argument,
    world_size_option,
)
from cpr_ext.tools.commands.left_alone import show_left_alone

if TYPE_CHECKING:
    from cpr_ext.tools.maintenance import CompactReport


@click.command()
@store_argument
@world_size_option
@click.option(
    "--mb-per-second",
    type=Amount(above=0),
    help="Read and write no more than this, together (MB: 10^6 bytes).",
)
@click.option(
    "--memory-mb",
    type=Amount(1),
    default=64,
    show_default=True,
    help="Rows held in memory at a time.",
)
@json_option
def compact(
    store: str,
    world_size: int | None,
    mb_per_second: float | None,
    memory_mb: float,
    as_json: bool,
) -> None:
    """Merge the segments of each shard of STORE, on which no process may be training.

    Every recovery point stays: the newest snapshot, and full-recovery points.

    STORE may be the directory that holds the stores of all workers of a job. They are compacted one
    after the other; one that is in use or damaged is left as it is, and named. Exit 1 then.
    """
    from cpr_ext.storage.job_stores import find_stores
    from cpr_ext.tools import maintenance

    limits = maintenance.MergeLimits(
        block_bytes=int(memory_mb * 1e6),
        bytes_per_second=None if mb_per_second is None else mb_per_second * 1e6,
    )
    if not find_stores(store, world_size=world_size).is_one_store:
        job = maintenance.compact_job(store, limits=limits, world_size=world_size)
        if as_json:
            print_json(job)
        else:
            for report in job.stores:
                _show(report)
            show_left_alone(job)
        sys.exit(1 if job.refused or job.missing else 0)
    report = maintenance.compact(store, limits=limits)
    print_json(report) if as_json else _show(report)


def _show(report: CompactReport) -> None:
    before = f"{count(report.segments_before, 'segment')} of {size(report.bytes_before)}"
    after = f"{count(report.segments_after, 'segment')} of {size(report.bytes_after)}"
    what = f"{before} became {after}" if report.shards_compacted else "nothing to merge"
    echo(f"{report.store}: {what}")
