"""What ``cpr plan`` plans with: options, a preset, a store and a failure log put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cpr_ext.errors import StoreError, UsageError
from cpr_ext.wings.cli.output import size
from cpr_ext.wings.policy import (
    ExponentialFailures,
    FailureModel,
    GammaFailures,
    JobCosts,
    JobSize,
    ParityCosts,
    StateBytes,
)
from cpr_ext.wings.policy.precision import PrecisionName, RowSizes

if TYPE_CHECKING:
    from cpr_ext.wings.policy.fitting import FailureFit
    from cpr_ext.wings.tools.maintenance import StoreSummary
    from cpr_ext.wings.tools.maintenance.inspection import TableSummary

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
        fit: how the failure model was fitted, if it was.
        parity: what parity costs; None: it is not considered.
        row_sizes: of the large tables, from the store; empty: not known.
        precision: of partial snapshots; None: not asked for.
        row_share: what a row takes there, as a share of float32.
    """

    job: JobSize
    costs: JobCosts
    failures: FailureModel
    target_pls: float
    state_bytes: StateBytes | None
    fit: FailureFit | None
    sources: list[InputSource] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    parity: ParityCosts | None = None
    row_sizes: tuple[RowSizes, ...] = ()
    precision: PrecisionName | None = None
    row_share: float = 1.0


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
    failures: FailureModel | None = None
    failures_origin = "given"
    if given["preset"] is not None:
        failures, failures_origin = _take_preset(figures, given["preset"], notes)
    state_bytes: StateBytes | None = None
    row_sizes: tuple[RowSizes, ...] = ()
    if given["store"] is not None:
        state_bytes, row_sizes = _take_store(figures, given, notes)
    if figures.is_given("load_minutes"):
        figures.forget("load_shard_minutes")  # it was of another load: as all, unless given too
    fit = None
    if given["failure_log"] is not None:
        if figures.is_given("mtbf_hours"):
            raise UsageError("--mtbf-hours and --failure-log both give the MTBF; pass one")
        fit = _fit(given)
        failures, failures_origin = fit.model, f"fitted to {given['failure_log']}"
        notes.extend(fit.notes)
    elif figures.is_given("mtbf_hours"):
        failures, failures_origin = ExponentialFailures(given["mtbf_hours"]), "given"
    _require_all(figures, has_failures=failures is not None)
    assert failures is not None
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
    sources.insert(2, InputSource("failures", _describe(failures, fit), failures_origin))
    if state_bytes is not None:
        text = f"{size(state_bytes.total_bytes)}, {size(state_bytes.prioritized_bytes)} of it in "
        sources.append(
            InputSource("bytes of a save", f"{text}large tables", "the store's manifests")
        )
    target_pls = figures.number("target_pls", _TARGET_PLS)
    return PlanInputs(
        job, costs, failures, target_pls, state_bytes, fit, sources, notes, row_sizes=row_sizes
    )


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


def _take_preset(figures: _Figures, name: str, notes: list[str]) -> tuple[FailureModel, str]:
    from cpr_ext.wings.policy.presets import find_preset

    preset = find_preset(name)
    origin = f"preset {name}"
    figures.found(
        origin,
        job_hours=preset.job.total_hours,
        shards=preset.job.num_shards,
        shards_per_failure=preset.job.shards_per_failure,
        save_minutes=60 * preset.costs.save_hours,
        load_minutes=60 * preset.costs.load_hours,
        load_shard_minutes=60 * preset.costs.load_shard_hours,
        reschedule_minutes=60 * preset.costs.reschedule_hours,
        target_pls=preset.target_pls,
    )
    notes.extend(preset.sources)
    return preset.failures, origin


def _take_store(
    figures: _Figures, given: Mapping[str, Any], notes: list[str]
) -> tuple[StateBytes, tuple[RowSizes, ...]]:
    from cpr_ext.wings.tools import maintenance

    summary = maintenance.inspect(given["store"])
    state, row_sizes = _state_bytes(summary)
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
    return state, row_sizes


_ONE_DISK = (
    "Assumed for the store: all shards on this one disk, and training that waits while a save is "
    "written. cpr_ext writes in the background, so this is an upper bound; the stall of your own "
    "run is what TargetPLS measures and plans with."
)


def _state_bytes(summary: StoreSummary) -> tuple[StateBytes, tuple[RowSizes, ...]]:
    from cpr_ext.state.table import PRIORITIZED_SHARE

    if not summary.points:
        raise StoreError(
            f"'{summary.store}' holds no snapshot yet, so its sizes are not known; give "
            "--save-minutes and --load-minutes instead"
        )
    total_rows = sum(table.num_embeddings for table in summary.tables)
    rows = prioritized = other = 0
    sizes = []
    for table in sorted(summary.tables, key=lambda table: -table.num_embeddings):
        if rows < PRIORITIZED_SHARE * total_rows:
            prioritized += table.num_embeddings * table.row_bytes
            sizes.append(_row_sizes(table))
        else:
            other += table.num_embeddings * table.row_bytes
        rows += table.num_embeddings
    return StateBytes(prioritized, other + summary.points[-1].dense_bytes), tuple(sizes)


def _row_sizes(table: TableSummary) -> RowSizes:
    """Return the row of a table; of another dtype than float32, nothing is rounded."""
    if table.dtype != "float32":
        return RowSizes(table.num_embeddings, 0, table.row_bytes)
    dim = table.embedding_dim
    return RowSizes(table.num_embeddings, dim, table.row_bytes - 4 * dim)


def _fit(given: Mapping[str, Any]) -> FailureFit:
    from cpr_ext.wings.policy.failure_log import read_failure_log
    from cpr_ext.wings.policy.fitting import fit_failures

    log = read_failure_log(given["failure_log"], nodes=given["nodes"])
    return fit_failures(log, given["failure_model"])


def _require_all(figures: _Figures, *, has_failures: bool) -> None:
    missing = [
        f"  --{name.replace('_', '-')}: {what}"
        for name, what in _NEEDED.items()
        if figures.get(name) is None and not (name == "mtbf_hours" and has_failures)
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


def _describe(failures: FailureModel, fit: FailureFit | None) -> str:
    text = f"every {failures.mean_hours:.3g} h"
    if isinstance(failures, GammaFailures):
        text += f", gamma of shape {failures.shape:.2f}"
    elif isinstance(failures, ExponentialFailures):
        text += ", at a constant rate"
    else:
        text += ", times seen drawn again"
    if fit is not None:
        text += (
            f" ({100 * fit.confidence:.0f} % interval {fit.mtbf_low_hours:.3g} to "
            f"{fit.mtbf_high_hours:.3g} h; {fit.num_failures} failures, {fit.num_censored} jobs "
            "without)"
        )
    return text


def minutes(hours: float) -> str:
    """Return a duration as a person reads it."""
    if hours < 1 / 60:
        return f"{3600 * hours:.3g} s"
    return f"{60 * hours:.3g} min" if hours < 2 else f"{hours:.3g} h"
