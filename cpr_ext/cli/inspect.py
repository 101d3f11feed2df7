"""``cpr inspect``: what a store holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cpr_ext.cli.output import (
    count,
    echo,
    json_option,
    print_json,
    print_table,
    size,
    store_argument,
)

if TYPE_CHECKING:
    from cpr_ext.maintenance import StoreSummary, TableDetails


@click.command()
@store_argument
@click.option("--table", metavar="NAME", help="How old the rows of one table are.")
@json_option
def inspect(store: str, table: str | None, as_json: bool) -> None:
    """Show the snapshots, shards, tables and sizes of STORE."""
    from cpr_ext import maintenance

    if table is not None:
        details = maintenance.inspect_table(store, table)
        print_json(details) if as_json else _show_table(details)
        return
    summary = maintenance.inspect(store)
    print_json(summary) if as_json else _show(summary)


def _show(summary: StoreSummary) -> None:
    held = [count(summary.num_shards, "shard"), count(len(summary.tables), "table")]
    echo(f"{summary.store}: {', '.join(held)}, {size(summary.file_bytes)}")
    click.echo()
    if not summary.points:
        click.echo("No snapshot was committed as a whole yet.\n")
    else:
        rows = [
            (
                point.snapshot,
                point.step,
                point.num_samples,
                "newest" if point is summary.points[-1] else "",
                "full-recovery point" if point.is_full_recovery_point else "",
            )
            for point in summary.points
        ]
        print_table(("snapshot", "step", "samples", "", ""), rows)
        click.echo()
    newest = summary.points[-1].step if summary.points else 0
    print_table(
        ("shard", "segments", "size", "base step", "newest step", "behind"),
        [
            (
                shard.shard,
                shard.segments,
                size(shard.file_bytes),
                shard.base_step if shard.base_step >= 0 else "-",
                shard.newest_step if shard.newest_step >= 0 else "-",
                max(0, newest - shard.newest_step) if shard.newest_step >= 0 else "-",
            )
            for shard in summary.shards
        ],
    )
    click.echo()
    print_table(
        ("table", "rows", "dim", "dtype", "row state", "size"),
        [
            (
                table.name,
                table.num_embeddings,
                table.embedding_dim,
                table.dtype,
                ", ".join(table.row_states) or "-",
                size(table.num_embeddings * table.row_bytes),
            )
            for table in summary.tables
        ],
    )


def _show_table(details: TableDetails) -> None:
    table = details.table
    echo(
        f"{table.name}: {table.num_embeddings} rows of {table.embedding_dim} {table.dtype}, "
        f"row state: {', '.join(table.row_states) or 'none'}, {table.row_bytes} bytes per row"
    )
    click.echo()
    names = ("freshest row", "1st quartile", "median", "3rd quartile", "oldest row")
    print_table(
        (f"captured before step {details.step}", "steps"),
        list(zip(names, details.steps_behind, strict=True)),
    )
    click.echo()
    print_table(("captured at step", "rows"), list(details.rows_by_step.items())[:20])
    if (more := len(details.rows_by_step) - 20) > 0:
        echo(f"... and {more} older steps; --json lists all")
