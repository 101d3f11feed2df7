"""``cpr export``: a plain state dict that other tools load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from cpr_ext.wings.cli.output import (
    count,
    echo,
    json_option,
    print_json,
    size,
    store_argument,
    world_size_option,
)
from cpr_ext.wings.tools.commands.opened_store import open_store

if TYPE_CHECKING:
    from cpr_ext.wings.tools.maintenance import ExportReport


@click.command()
@store_argument
@click.argument("out", type=click.Path())
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["safetensors", "torch", "dcp", "torchrec"]),
    default="safetensors",
    show_default=True,
    help="dcp is torch.distributed.checkpoint; torchrec too, with the state of optimizers by the "
    "names that TorchRec loads. All but safetensors hold the model in memory once.",
)
@click.option(
    "--full",
    is_flag=True,
    help="The newest full-recovery point (of a job: that all workers have), not newest snapshots.",
)
@click.option(
    "--keep-names",
    is_flag=True,
    help="Leave in names what wrappers add: module., _orig_mod., _dmp_wrapped_module.",
)
@click.option(
    "--rows-in-order",
    is_flag=True,
    help="Of a table that several workers' stores have under one name, without saying which part "
    "of it, the rows follow each other in the order of the workers.",
)
@world_size_option
@json_option
def export(
    store: str,
    out: str,
    format_name: Literal["safetensors", "torch", "dcp", "torchrec"],
    full: bool,
    keep_names: bool,
    rows_in_order: bool,
    world_size: int | None,
    as_json: bool,
) -> None:
    """Write the newest snapshot of STORE as plain state dicts into the new directory OUT.

    STORE may be the directory that holds the stores of all workers of a job. OUT is then the
    unsharded model: tables whole, however they were cut, and the dense part of the worker that got
    furthest. Where workers' newest snapshots are of different steps, the output and OUT/export.json
    say so; --full takes one step for all. STORE may also be the address of a copy (s3://...).
    """
    from cpr_ext.wings.tools import maintenance

    directory = open_store(store)
    report = maintenance.export(
        directory,
        out,
        format=format_name,
        full=full,
        keep_names=keep_names,
        rows_in_order=rows_in_order,
        world_size=world_size,
        address=store,
    )
    print_json(report) if as_json else _show(report)


def _show(report: ExportReport) -> None:
    what = f"{count(report.tensors, 'tensor')}, {size(report.tensor_bytes)}, of step {report.step}"
    echo(f"{report.out}: {what}: {', '.join(report.files)}")
    if len(report.stores) > 1:
        for store in report.stores:
            lost = f", {store.samples_lost} samples lost" if store.samples_lost else ""
            dense = ", the dense part is its" if store.worker == report.dense_from else ""
            echo(f"worker {store.worker}: snapshot of step {store.step}{lost}{dense}")
    if report.step_of_rows is None:
        echo("rows: the newest saved state of each, perhaps of older steps; --full takes one")
    if report.removed:
        echo(f"names: without {', '.join(report.removed)} (--keep-names leaves them)")
    for note in report.notes:
        echo(f"note: {note}")
