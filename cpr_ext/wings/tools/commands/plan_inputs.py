"""What ``cpr plan`` plans with: options, a preset, a store and a failure log put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click

from cpr_ext.errors import StoreError, UsageError
from cpr_ext.wings.cli.numbers import Amount
from cpr_ext.wings.cli.output import size
from cpr_ext.wings.policy import (
    FailureFit,
    JobCosts,
    JobSize,
    ParityCosts,
    StateBytes,
    fit_failures,
    read_failure_log,
)
from cpr_ext.wings.policy.parity import rebuild_hours

if TYPE_CHECKING:
    from cpr_ext.wings.tools.maintenance import StoreSummary

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
    "save_minutes": "how long saving everything blocks training (or --store of a short trial run, "
    "and --write-mb-per-second)",
    "load_minutes": "how long loading everything takes (or --store of a short trial run, and "
    "--read-mb-per-second)",
}


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
    state_bytes: StateBytes | None
    fit: FailureFit | None
    sources: list[InputSource] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    parity: ParityCosts | None = None


class _Figures:
    """Numbers by option name; what is given on the command line wins over what is found."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._found: dict[str, tuple[float, str]] = {}

    def found(self, origin: str, **values: float) -> None:
        self._found.update({name: (value, origin) for name, value in values.items()})

    def forget(self, name: str) -> None:
        """Override the value that was found under this name."""
        self._found.pop(name, None)

    def is_given(self, name: str) -> bool:
        return self._given[name] is not None

    def get(self, name: str) -> tuple[float, str] | None:
        if self.is_given(name):
            return self._given[name], "given"
        return self._found.get(name)

    def number(self, name: str, default: float = 0.0) -> float:
        entry = self.get(name)
        return default if entry is None else entry[0]

    def origin(self, name: str) -> str:
        entry = self.get(name)
        return "assumed" if entry is None else entry[1]


def gather(given: Mapping[str, Any]) -> PlanInputs:
    """Put the inputs together.

    Raises:
        UsageError: something needed is missing (all of it is named), or out of range.
        DataError, StoreError, StorageError: the log, the store cannot be used.
    """
    _require_used(given)
    figures = _Figures(given)
    notes: list[str] = []
    if given["preset"] is not None:
        _take_preset(figures, given["preset"], notes)
    state_bytes: StateBytes | None = None
    if given["store"] is not None:
        state_bytes = _take_store(figures, given, notes)
    if figures.is_given("load_minutes"):
        figures.forget("load_shard_minutes")  # it was of another load: as all, unless given too
    fit = None
    if given["failure_log"] is not None:
        if figures.is_given("mtbf_hours"):
            raise UsageError("--mtbf-hours and --failure-log both give the MTBF; pass one")
        fit = fit_failures(read_failure_log(given["failure_log"], nodes=given["nodes"]))
        figures.found(f"fitted to {given['failure_log']}", mtbf_hours=fit.mtbf_hours)
    _require_all(figures)
    job = JobSize(
        figures.number("job_hours"),
        int(figures.number("shards")),
        int(figures.number("shards_per_failure", 1)),
    )
    costs = JobCosts(
        save_hours=figures.number("save_minutes") / 60,
        load_hours=figures.number("load_minutes") / 60,
        load_shard_hours=figures.number("load_shard_minutes", figures.number("load_minutes")) / 60,
        reschedule_hours=figures.number("reschedule_minutes") / 60,
    )
    sources = _sources(figures, job, costs)
    mtbf_hours = figures.number("mtbf_hours")
    described = InputSource("failures", _describe(mtbf_hours, fit), figures.origin("mtbf_hours"))
    sources.insert(2, described)
    if state_bytes is not None:
        text = f"{size(state_bytes.total_bytes)}, {size(state_bytes.prioritized_bytes)} of it in "
        sources.append(
            InputSource("bytes of a save", f"{text}large tables", "the store's manifests")
        )
    target_pls = figures.number("target_pls", _TARGET_PLS)
    inputs = PlanInputs(job, costs, mtbf_hours, target_pls, state_bytes, fit, sources, notes)
    _add_parity(inputs, given)
    return inputs


def _require_used(given: Mapping[str, Any]) -> None:
    """Refuse options that nothing would use."""
    for option, needed in (
        ("nodes", "failure_log"),
        ("write_mb_per_second", "store"),
        ("read_mb_per_second", "store"),
    ):
        if given[option] is not None and given[needed] is None:
            text = f"--{option} is of use only with --{needed}".replace("_", "-")
            if option == "nodes":
                text += "; over how many servers the tables are cut: --shards"
            raise UsageError(text)


def _take_preset(figures: _Figures, name: str, notes: list[str]) -> None:
    from cpr_ext.wings.policy.presets import find_preset

    preset = find_preset(name)
    figures.found(
        f"preset {name}",
        job_hours=preset.job.total_hours,
        shards=preset.job.num_shards,
        shards_per_failure=preset.job.shards_per_failure,
        mtbf_hours=preset.mtbf_hours,
        save_minutes=60 * preset.costs.save_hours,
        load_minutes=60 * preset.costs.load_hours,
        load_shard_minutes=60 * preset.costs.load_shard_hours,
        reschedule_minutes=60 * preset.costs.reschedule_hours,
        target_pls=preset.target_pls,
    )
    notes.extend(preset.sources)


def _take_store(figures: _Figures, given: Mapping[str, Any], notes: list[str]) -> StateBytes:
    from cpr_ext.wings.tools import maintenance

    summary = maintenance.inspect(given["store"])
    state = _state_bytes(summary)
    write, read = given["write_mb_per_second"], given["read_mb_per_second"]
    origin = "the store's bytes at the disk speed given"
    if write is not None:
        figures.found(origin, save_minutes=state.total_bytes / (write * 1e6) / 60)
    if read is not None:
        lost = figures.number("shards_per_failure", 1)
        load_minutes = state.total_bytes / (read * 1e6) / 60
        figures.found(
            origin,
            load_minutes=load_minutes,
            load_shard_minutes=load_minutes * lost / figures.number("shards", 1),
        )
    if write is not None or read is not None:
        notes.append(_ONE_DISK)
    return state


_ONE_DISK = (
    "Assumed for the store: all shards on this one disk, and training that waits while a save is "
    "written. cpr_ext writes in the background, so this is an upper bound; the stall of your own "
    "run is what TargetPLS measures and plans with."
)


def _state_bytes(summary: StoreSummary) -> StateBytes:
    from cpr_ext.state.table import PRIORITIZED_SHARE

    if not summary.points:
        raise StoreError(
            f"'{summary.store}' holds no snapshot yet, so its sizes are not known; give "
            "--save-minutes and --load-minutes instead"
        )
    total_rows = sum(table.num_embeddings for table in summary.tables)
    rows = prioritized = other = 0
    for table in sorted(summary.tables, key=lambda table: -table.num_embeddings):
        if rows < PRIORITIZED_SHARE * total_rows:
            prioritized += table.num_embeddings * table.row_bytes
        else:
            other += table.num_embeddings * table.row_bytes
        rows += table.num_embeddings
    return StateBytes(prioritized, other + summary.points[-1].dense_bytes)


def _require_all(figures: _Figures) -> None:
    missing = [
        f"  --{name.replace('_', '-')}: {what}"
        for name, what in _NEEDED.items()
        if figures.get(name) is None
    ]
    if missing:
        raise UsageError("\n".join(["a plan needs these, or a --preset:", *missing]))


def _sources(figures: _Figures, job: JobSize, costs: JobCosts) -> list[InputSource]:
    lost = "all" if job.shards_per_failure == job.num_shards else job.shards_per_failure
    return [
        InputSource("job", f"{job.total_hours:g} h of training", figures.origin("job_hours")),
        InputSource(
            "shards",
            f"{job.num_shards}, {lost} lost per failure",
            _join(figures.origin("shards"), figures.origin("shards_per_failure")),
        ),
        InputSource("save everything", minutes(costs.save_hours), figures.origin("save_minutes")),
        InputSource("load everything", minutes(costs.load_hours), figures.origin("load_minutes")),
        InputSource(
            "load lost shards",
            minutes(costs.load_shard_hours),
            figures.origin("load_shard_minutes"),
        ),
        InputSource(
            "reschedule", minutes(costs.reschedule_hours), figures.origin("reschedule_minutes")
        ),
        InputSource(
            "PLS accepted", f"{figures.number('target_pls', 0.1):g}", figures.origin("target_pls")
        ),
    ]


def _join(first: str, second: str) -> str:
    return first if first == second else f"{first}; {second}"


def _describe(mtbf_hours: float, fit: FailureFit | None) -> str:
    text = f"every {mtbf_hours:.3g} h, at a constant rate"
    if fit is not None:
        text += (
            f" (95 % interval {fit.low_hours:.3g} to {fit.high_hours:.3g} h; {fit.num_failures} "
            f"failures, {fit.num_censored} jobs without)"
        )
    return text


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
        InputSource("rebuild a shard", minutes(parity.rebuild_hours), origin),
    ]


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def minutes(hours: float) -> str:
    """Return a duration as a person reads it."""
    if hours < 1 / 60:
        return f"{3600 * hours:.3g} s"
    return f"{60 * hours:.3g} min" if hours < 2 else f"{hours:.3g} h"
