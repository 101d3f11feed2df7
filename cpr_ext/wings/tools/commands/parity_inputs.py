"""What ``cpr plan`` and ``cpr emulate`` plan parity with: its options, and their origins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from cpr_ext.errors import UsageError
from cpr_ext.wings.cli.numbers import Amount
from cpr_ext.wings.cli.output import size
from cpr_ext.wings.policy import JobCosts, JobSize, ParityCosts
from cpr_ext.wings.policy.parity_costs import link_bytes, rebuild_hours, step_bytes, wire_share
from cpr_ext.wings.tools.commands.plan_inputs import InputSource, PlanInputs, minutes

# What is assumed where nothing is given (ours): the most that this library's parity may take, and
# what gloo moves between two processes of one machine.
STEADY_PERCENT = 3.0
LINK_MB_PER_SECOND = 1000.0
_POSITIVE = Amount(above=0)
_TRAFFIC = ("rows_per_step", "row_bytes", "step_seconds")
_COSTS = ("parity_percent", "rebuild_minutes", "rebuild_slowdown_percent")
_SIZES = ("table_gb", "link_mb_per_second", *_TRAFFIC)


def cost_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that a plan and an emulation share."""
    options = [
        click.option(
            "--parity-group-size",
            type=click.IntRange(min=2),
            help="Also take parity in peers' memory, in groups of so many workers; 2 is a mirror.",
        ),
        click.option(
            "--parity-percent",
            type=Amount(0),
            help=f"Training time that parity adds at every step. Default: {STEADY_PERCENT:g}.",
        ),
        click.option(
            "--rebuild-minutes",
            type=Amount(0),
            help="To rebuild a lost shard from peers' memory. Default: as long as loading it.",
        ),
        click.option(
            "--rebuild-slowdown-percent",
            type=Amount(0, 100),
            help="Training speed lost meanwhile. Default: 100, training stands still.",
        ),
    ]
    return _with(options, command)


def size_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options from which a plan derives rebuild time and traffic."""
    options = [
        click.option(
            "--table-gb",
            type=_POSITIVE,
            help="All rows with their optimizer state (GB: 10^9 bytes); gives the rebuild time. "
            "Default: the store's.",
        ),
        click.option(
            "--link-mb-per-second",
            type=_POSITIVE,
            help=f"Of one worker's network link. Default: {LINK_MB_PER_SECOND:g}.",
        ),
        click.option(
            "--rows-per-step",
            type=_POSITIVE,
            help="Different rows that a step changes on all workers.",
        ),
        click.option("--row-bytes", type=_POSITIVE, help="Of a row with its optimizer state."),
        click.option("--step-seconds", type=_POSITIVE, help="Of a training step without parity."),
    ]
    return _with(options, command)


def _with(options: list[Any], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def parity_costs(
    given: Mapping[str, Any], job: JobSize, costs: JobCosts
) -> tuple[ParityCosts | None, str]:
    """Return what parity costs as given or assumed, and the origin of the rebuild time.

    Raises:
        UsageError: an option of parity without a group size, or groups that do not fit.
    """
    for name in (*_COSTS, *_SIZES[1:]):
        if given.get(name) is not None and given["parity_group_size"] is None:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is of use only with --parity-group-size")
    if given["parity_group_size"] is None:
        return None, ""
    rebuild, origin = given["rebuild_minutes"], "given"
    if rebuild is None:
        rebuild, origin = 60 * costs.load_shard_hours, "assumed: as loading the lost shards"
    parity = ParityCosts(
        group_size=given["parity_group_size"],
        steady_share=_or(given["parity_percent"], STEADY_PERCENT) / 100,
        rebuild_hours=rebuild / 60,
        rebuild_stall=_or(given["rebuild_slowdown_percent"], 100.0) / 100,
    )
    parity.require_fit(job.num_shards)
    return parity, origin


def add_parity(inputs: PlanInputs, given: Mapping[str, Any]) -> None:
    """Put what is given of parity to the inputs of a plan; nothing without a group size.

    Raises:
        UsageError: something contradicts, is missing, or out of range.
    """
    parity, origin = parity_costs(given, inputs.job, inputs.costs)
    if parity is None:
        if given["table_gb"] is not None:
            raise UsageError("--table-gb is of use only with --parity-group-size")
        return
    link = 1e6 * _or(given["link_mb_per_second"], LINK_MB_PER_SECOND)
    at = f"{size(link)}/s per link"
    if (table_bytes := _table_bytes(inputs, given)) is not None:
        if given["rebuild_minutes"] is None:
            shard_bytes = table_bytes / inputs.job.num_shards
            hours = rebuild_hours(shard_bytes, parity.group_size, link)
            parity = ParityCosts(
                parity.group_size, parity.steady_share, hours, parity.rebuild_stall
            )
            assumed = "" if given["link_mb_per_second"] else " (assumed)"
            origin = f"a shard of {size(shard_bytes)} at {at}{assumed}"
        elif given["table_gb"] is not None:
            raise UsageError("--table-gb and --rebuild-minutes both give the rebuild time")
    inputs.parity = parity
    inputs.sources += [
        InputSource("parity group", f"{parity.group_size} workers, {parity.name}", "given"),
        InputSource(
            "parity, each step",
            f"{100 * parity.steady_share:g} % of training time",
            "given" if given["parity_percent"] is not None else "assumed",
        ),
        InputSource("rebuild a shard", minutes(parity.rebuild_hours), origin),
    ]
    if all(given[name] is not None for name in _TRAFFIC):
        inputs.sources.append(_traffic(inputs.job, given, link))


def _table_bytes(inputs: PlanInputs, given: Mapping[str, Any]) -> float | None:
    if given["table_gb"] is not None:
        return 1e9 * float(given["table_gb"])
    return None if inputs.state_bytes is None else inputs.state_bytes.total_bytes


def _traffic(job: JobSize, given: Mapping[str, Any], link: float) -> InputSource:
    rows, row_bytes, seconds = (given[name] for name in _TRAFFIC)
    each = link_bytes(rows, row_bytes, job.num_shards)
    busy = wire_share(each, seconds, link)
    text = (
        f"{size(step_bytes(rows, row_bytes))} per step, {size(each / seconds)}/s per link, "
        f"{100 * busy:.2g} % of it"
    )
    return InputSource("parity's traffic", text, "rows * (row bytes + 8)")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
