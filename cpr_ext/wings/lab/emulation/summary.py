"""What the runs of a campaign say, strategy by strategy; pairs are runs of one seed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cpr_ext.errors import UsageError
from cpr_ext.wings.cli.output import without_nan
from cpr_ext.wings.lab.emulation.campaign import Campaign, RunKey
from cpr_ext.wings.lab.emulation.scenario import STRATEGIES, EmulatedStrategyName

CONFIDENCE = 0.95
_RESAMPLES = 10_000
_RESAMPLING_SEED = 1


@dataclass(frozen=True)
class Estimate:
    """A mean over ``count`` seeds, and the interval that holds the true one with 95 %.

    ``low`` and ``high`` are nan for one seed, which has no spread.
    """

    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Line:
    """A least-squares line ``slope * x + intercept`` and Pearson's correlation of what it fits."""

    slope: float
    intercept: float
    correlation: float
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and Student-t interval of independent values.

    Raises:
        UsageError: there is no value.
    """
    if not len(values):
        raise UsageError("a mean needs at least one value")
    array = np.asarray(values, dtype=float)
    mean, count = float(array.mean()), len(array)
    if count == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    from scipy.stats import t

    half = float(t.ppf(0.5 + CONFIDENCE / 2, count - 1) * array.std(ddof=1) / math.sqrt(count))
    return Estimate(mean, mean - half, mean + half, count)


def estimate_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Ratio of the means of paired values, with a percentile bootstrap interval over the pairs.

    Deterministic. The bounds are nan for one pair, or where resampled denominators come to 0 or
    below, so that the ratio has no meaning.

    Raises:
        UsageError: no pair, or values without a partner.
    """
    if not len(numerators) or len(numerators) != len(denominators):
        raise UsageError(f"{len(numerators)} values and {len(denominators)} make no pairs")
    upper, lower = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    count = len(upper)
    mean = float(upper.mean() / lower.mean()) if lower.mean() else math.nan
    if count == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    picks = np.random.default_rng(_RESAMPLING_SEED).integers(count, size=(_RESAMPLES, count))
    bottoms = lower[picks].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    if float(np.mean(bottoms <= 0)) > tail:
        return Estimate(mean, math.nan, math.nan, count)
    ratios = _divide(upper[picks].mean(axis=1), bottoms)
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Estimate(mean, float(low), float(high), count)


def _divide(
    upper: npt.NDArray[np.float64], lower: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    return np.divide(upper, lower, out=np.full_like(upper, np.inf), where=lower > 0)


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line | None:
    """Fit a line; return None for fewer than three points, or constant ``x`` or ``y``."""
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    slope, intercept = np.polyfit(x, y, 1)
    correlation = float(np.corrcoef(x, y)[0, 1])
    return Line(float(slope), float(intercept), correlation, len(x))


def spelled(estimate: Estimate | None, factor: float = 1, *, digits: int = 2) -> str:
    """Return a mean and its interval, times a factor such as 100 for percent."""
    if estimate is None or math.isnan(estimate.mean):
        return "-"
    text = f"{factor * estimate.mean:.{digits}f}"
    if math.isnan(estimate.low):
        return text
    return f"{text} [{factor * estimate.low:.{digits}f}, {factor * estimate.high:.{digits}f}]"


OVERHEAD_PARTS = (
    "save_hours",
    "load_hours",
    "lost_computation_hours",
    "reschedule_hours",
    "parity_hours",
)


@dataclass(frozen=True)
class StrategySummary:
    """One strategy over its seeds.

    Attributes:
        seeds: those of which there is a run.
        overhead_share: overhead as a share of the job's useful hours.
        overhead_parts: mean hours by part.
        pls: at the end of the job, of saves of all rows every T_save.
        pls_since_any_save: the same account, but every snapshot counts as a save of all rows.
        auc, logloss: on the test samples.
        auc_loss: AUC of the run without failure less that of this one, paired.
        logloss_increase: log loss of this run less that without failure, paired.
        loss_to_vanilla: mean AUC loss over that of CPR-vanilla, paired.
        overhead_removed: 1 - mean overhead over that of full recovery, paired.
        loss_by_pls: line of AUC loss over PLS, one point a seed.
    """

    name: EmulatedStrategyName
    seeds: tuple[int, ...]
    overhead_share: Estimate
    overhead_parts: dict[str, float]
    pls: Estimate
    pls_since_any_save: Estimate
    auc: Estimate
    logloss: Estimate
    auc_loss: Estimate | None
    logloss_increase: Estimate | None
    loss_to_vanilla: Estimate | None
    overhead_removed: Estimate | None
    loss_by_pls: Line | None

    @property
    def label(self) -> str:
        """As people call it."""
        return STRATEGIES[self.name]


def to_plain(campaign: Campaign) -> dict[str, Any]:
    """Return the reported values of a campaign and of each of its runs, as JSON values."""
    figures = ("auc", "logloss", "pls", "pls_since_any_save", "overhead_share")
    return {
        "config": campaign.config,
        "facts": campaign.facts,
        "strategies": [
            without_nan({**asdict(one), "label": one.label}) for one in summarize(campaign)
        ],
        "runs": [
            {
                "strategy": key.strategy,
                "seed": key.seed,
                **{figure: run[figure] for figure in figures},
                "failures": [[round(f["hour"], 4), f["shards"]] for f in run["failures"]],
                "train_seconds": round(run["train_seconds"], 2),
            }
            for key, run in sorted(campaign.runs.items())
        ],
    }


def to_json(campaign: Campaign) -> str:
    """Return :func:`to_plain` as text: one line for each run, so that diffs show single runs."""
    plain = to_plain(campaign)
    runs = ",\n  ".join(json.dumps(run, allow_nan=False) for run in plain.pop("runs"))
    head = json.dumps(plain, indent=1, allow_nan=False)
    return f'{head.removesuffix("}").rstrip()},\n "runs": [\n  {runs}\n ]\n}}\n'


def summarize(campaign: Campaign) -> list[StrategySummary]:
    """Return one summary per strategy of which there are runs.

    Raises:
        UsageError: there is no finished run.
    """
    if not campaign.runs:
        raise UsageError(f"'{campaign.directory}' holds no finished run")
    return [
        _summarize(campaign, name)
        for name in STRATEGIES
        if any(key.strategy == name for key in campaign.runs)
    ]


def paired_losses(campaign: Campaign, name: EmulatedStrategyName) -> dict[int, float]:
    """Return AUC loss of a strategy by seed, of seeds that were also run without failure."""
    return _paired(campaign, name, "auc", sign=-1)


def _summarize(campaign: Campaign, name: EmulatedStrategyName) -> StrategySummary:
    runs = {key.seed: run for key, run in sorted(campaign.runs.items()) if key.strategy == name}
    losses = paired_losses(campaign, name)
    increases = _paired(campaign, name, "logloss", sign=1)
    vanilla = paired_losses(campaign, "cpr-vanilla")
    full = {
        key.seed: run["overhead_share"]
        for key, run in campaign.runs.items()
        if key.strategy == "full"
    }
    shares = {seed: run["overhead_share"] for seed, run in runs.items()}
    kept = _ratio(shares, full)
    is_reference = name == "no-failure"
    return StrategySummary(
        name=name,
        seeds=tuple(runs),
        overhead_share=estimate(list(shares.values())),
        overhead_parts={
            part: estimate([run["overhead"].get(part, 0.0) for run in runs.values()]).mean
            for part in OVERHEAD_PARTS
        },
        pls=estimate([run["pls"] for run in runs.values()]),
        pls_since_any_save=estimate([run["pls_since_any_save"] for run in runs.values()]),
        auc=estimate([run["auc"] for run in runs.values()]),
        logloss=estimate([run["logloss"] for run in runs.values()]),
        auc_loss=estimate(list(losses.values())) if losses and not is_reference else None,
        logloss_increase=(
            estimate(list(increases.values())) if increases and not is_reference else None
        ),
        loss_to_vanilla=None if is_reference or name == "full" else _ratio(losses, vanilla),
        overhead_removed=(
            None
            if kept is None or is_reference or name == "full"
            else Estimate(1 - kept.mean, 1 - kept.high, 1 - kept.low, kept.count)
        ),
        loss_by_pls=fit_line([runs[seed]["pls"] for seed in losses], list(losses.values())),
    )


def _paired(
    campaign: Campaign, name: EmulatedStrategyName, figure: str, *, sign: int
) -> dict[int, float]:
    differences = {}
    for key, run in sorted(campaign.runs.items()):
        whole = campaign.runs.get(RunKey(key.seed, "no-failure"))
        if key.strategy == name and whole is not None:
            differences[key.seed] = sign * (run[figure] - whole[figure])
    return differences


def _ratio(upper: dict[int, float], lower: dict[int, float]) -> Estimate | None:
    seeds = sorted(upper.keys() & lower.keys())
    if not seeds:
        return None
    return estimate_ratio([upper[seed] for seed in seeds], [lower[seed] for seed in seeds])
