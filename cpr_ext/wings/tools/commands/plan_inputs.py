"""What ``cpr plan`` plans with: options, a preset and a failure log put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import click

from cpr_ext.errors import UsageError
from cpr_ext.wings.cli.numbers import Amount
from cpr_ext.wings.cli.output import size
from cpr_ext.wings.policy import (
    FailureFit,
    JobCosts,
    JobSize,
    ParityCosts,
    fit_failures,
    read_failure_log,
)
from cpr_ext.wings.policy.costs import duration
from cpr_ext.wings.policy.parity import rebuild_hours
from cpr_ext.wings.policy.presets import find_preset

# What is assumed where nothing is given (ours): the most that this library's parity may take, and
# what gloo moves between two processes of one machine.
_STEADY_PERCENT = 3.0
_LINK_MB_PER_SECOND = 1000.0

_TARGET_PLS = 0.02  # unless one is given, or the preset has one
# Option -> what it is, for the message that names all that is missing.
_NEEDED = {
    "job_hours": "how long the job trains",
    "shards": "over how many servers the tables are cut",
    "mtbf_hours": "mean time between failures (or --failure-log FILE)",
    "save_minutes": "how long saving everything blocks training",
    "load_minutes": "how long loading everything takes",
}
_OTHERS = ("shards_per_failure", "load_shard_minutes", "reschedule_minutes", "target_pls")


@dataclass(frozen=True)
class InputSource:
    """An input and where it is from."""

    what: str
    value: str
    origin: str


@dataclass
class PlanInputs:
    """All that a plan needs, with the origin of each figure.

    Attributes:
        fit: how the MTBF was fitted, if it was.
        parity: what parity costs; None: it is not considered.
    """

    job: JobSize
    costs: JobCosts
    mtbf_hours: float
    target_pls: float
    fit: FailureFit | None
    sources: list[InputSource]
    notes: list[str] = field(default_factory=list)
    parity: ParityCosts | None = None


Figures = dict[str, tuple[float, str]]  # option -> its value, and where that is from


def gather(given: Mapping[str, Any]) -> PlanInputs:
    """Put the inputs together; what is given wins over a preset.

    Raises:
        UsageError: something needed is missing (all of it is named), or out of range.
        DataError: the log cannot be used.
    """
    figures: Figures = {}
    notes: list[str] = []
    if given["preset"] is not None:
        _take_preset(figures, given["preset"], notes)
    if given["load_minutes"] is not None:  # the preset's was of another load: as all
        figures.pop("load_shard_minutes", None)
    names = (*_NEEDED, *_OTHERS)
    figures |= {name: (given[name], "given") for name in names if given[name] is not None}
    fit = None
    if given["failure_log"] is not None:
        if given["mtbf_hours"] is not None:
            raise UsageError("--mtbf-hours and --failure-log both give the MTBF; pass one")
        fit = fit_failures(read_failure_log(given["failure_log"], nodes=given["nodes"]))
        figures["mtbf_hours"] = (fit.mtbf_hours, f"fitted to {given['failure_log']}")
    elif given["nodes"] is not None:
        raise UsageError(
            "--nodes is of use only with --failure-log; over how many servers the tables are cut: "
            "--shards"
        )
    if missing := [name for name in _NEEDED if name not in figures]:
        lines = [f"  --{name.replace('_', '-')}: {_NEEDED[name]}" for name in missing]
        raise UsageError("\n".join(["a plan needs these, or a --preset:", *lines]))
    assumed = {
        "shards_per_failure": 1,
        "load_shard_minutes": figures["load_minutes"][0],
        "reschedule_minutes": 0.0,
        "target_pls": _TARGET_PLS,
    }
    figures = {name: (value, "assumed") for name, value in assumed.items()} | figures
    value = {name: value for name, (value, _) in figures.items()}
    job = JobSize(value["job_hours"], int(value["shards"]), int(value["shards_per_failure"]))
    costs = JobCosts(
        save_hours=value["save_minutes"] / 60,
        load_hours=value["load_minutes"] / 60,
        load_shard_hours=value["load_shard_minutes"] / 60,
        reschedule_hours=value["reschedule_minutes"] / 60,
    )
    mtbf_hours, target_pls = value["mtbf_hours"], value["target_pls"]
    sources = _sources(figures, job, costs, fit)
    inputs = PlanInputs(job, costs, mtbf_hours, target_pls, fit, sources, notes)
    _add_parity(inputs, given)
    return inputs


def _take_preset(figures: Figures, name: str, notes: list[str]) -> None:
    preset = find_preset(name)
    found = {
        "job_hours": preset.job.total_hours,
        "shards": preset.job.num_shards,
        "shards_per_failure": preset.job.shards_per_failure,
        "mtbf_hours": preset.mtbf_hours,
        "save_minutes": 60 * preset.costs.save_hours,
        "load_minutes": 60 * preset.costs.load_hours,
        "load_shard_minutes": 60 * preset.costs.load_shard_hours,
        "reschedule_minutes": 60 * preset.costs.reschedule_hours,
        "target_pls": preset.target_pls,
    }
    figures |= {option: (value, f"preset {name}") for option, value in found.items()}
    notes.extend(preset.sources)


def _sources(
    figures: Figures, job: JobSize, costs: JobCosts, fit: FailureFit | None
) -> list[InputSource]:
    lost = "all" if job.shards_per_failure == job.num_shards else job.shards_per_failure
    origins = [figures["shards"][1], figures["shards_per_failure"][1]]
    failures = f"every {figures['mtbf_hours'][0]:.3g} h, at a constant rate"
    if fit is not None:
        failures += (
            f" (95 % interval {fit.low_hours:.3g} to {fit.high_hours:.3g} h; {fit.num_failures} "
            f"failures, {fit.num_censored} jobs without)"
        )
    shown = {
        "job_hours": ("job", f"{job.total_hours:g} h of training"),
        "shards": ("shards", f"{job.num_shards}, {lost} lost per failure"),
        "mtbf_hours": ("failures", failures),
        "save_minutes": ("save everything", duration(costs.save_hours)),
        "load_minutes": ("load everything", duration(costs.load_hours)),
        "load_shard_minutes": ("load lost shards", duration(costs.load_shard_hours)),
        "reschedule_minutes": ("reschedule", duration(costs.reschedule_hours)),
        "target_pls": ("PLS accepted", f"{figures['target_pls'][0]:g}"),
    }
    origin = {name: each[1] for name, each in figures.items()}
    origin["shards"] = "; ".join(dict.fromkeys(origins))
    return [InputSource(*text, origin[name]) for name, text in shown.items()]


def parity_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of parity, which a plan and an emulation share."""
    options = [
        click.option(
            "--parity-group-size",
            type=click.IntRange(min=2),
            help="Also take parity in peers' memory, in groups of so many workers; 2 is a mirror.",
        ),
        click.option(
            "--parity-percent",
            type=Amount(0),
            help=f"Training time that parity adds at every step. Default: {_STEADY_PERCENT:g}.",
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
    if given["parity_group_size"] is None:
        for name in ("parity_percent", "rebuild_minutes", "rebuild_slowdown_percent", "table_gb"):
            if given.get(name) is not None:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} is of use only with --parity-group-size")
        return None, ""
    rebuild, origin = given["rebuild_minutes"], "given"
    if rebuild is None:
        rebuild, origin = 60 * costs.load_shard_hours, "assumed: as loading the lost shards"
    parity = ParityCosts(
        group_size=given["parity_group_size"],
        steady_share=_or(given["parity_percent"], _STEADY_PERCENT) / 100,
        rebuild_hours=rebuild / 60,
        rebuild_stall=_or(given["rebuild_slowdown_percent"], 100.0) / 100,
    )
    parity.require_fit(job.num_shards)
    return parity, origin


def _add_parity(inputs: PlanInputs, given: Mapping[str, Any]) -> None:
    """Put what is given of parity to the inputs of a plan; nothing without a group size."""
    parity, origin = parity_costs(given, inputs.job, inputs.costs)
    if parity is None:
        return
    if given["table_gb"] is not None:
        if given["rebuild_minutes"] is not None:
            raise UsageError("--table-gb and --rebuild-minutes both give the rebuild time")
        shard_bytes = 1e9 * given["table_gb"] / inputs.job.num_shards
        link = 1e6 * _LINK_MB_PER_SECOND
        hours = rebuild_hours(shard_bytes, parity.group_size, link)
        parity = replace(parity, rebuild_hours=hours)
        origin = f"a shard of {size(shard_bytes)} at {size(link)}/s per link (assumed)"
    inputs.parity = parity
    inputs.sources += [
        InputSource("parity group", f"{parity.group_size} workers, {parity.name}", "given"),
        InputSource(
            "parity, each step",
            f"{100 * parity.steady_share:g} % of training time",
            "given" if given["parity_percent"] is not None else "assumed",
        ),
        InputSource("rebuild a shard", duration(parity.rebuild_hours), origin),
    ]


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
