"""``cpr export``: a plain state dict that other tools load."""

from __future__ import annotations

from typing import Literal

import click

from cpr_ext.cli.output import count, echo, json_option, print_json, size, store_argument


@click.command()
@store_argument
@click.argument("out", type=click.Path())
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["safetensors", "torch", "dcp"]),
    default="safetensors",
    show_default=True,
    help="dcp is torch.distributed.checkpoint. torch and dcp hold the model in memory once.",
)
@click.option("--full", is_flag=True, help="The newest full-recovery point, not newest snapshot.")
@json_option
def export(
    store: str,
    out: str,
    format_name: Literal["safetensors", "torch", "dcp"],
    full: bool,
    as_json: bool,
) -> None:
    """Write the newest snapshot of STORE as plain state dicts into the new directory OUT."""
    from cpr_ext import maintenance

    report = maintenance.export(store, out, format=format_name, full=full)
    if as_json:
        print_json(report)
        return
    what = f"{count(report.tensors, 'tensor')}, {size(report.tensor_bytes)}, of step {report.step}"
    echo(f"{report.out}: {what}: {', '.join(report.files)}")
