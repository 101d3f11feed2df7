"""What the runs of a campaign say, strategy by strategy; pairs are runs of one seed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.emulation.campaign import Campaign, RunKey
from cpr_ext.wings.lab.emulation.statistics import (
    Estimate,
    Line,
    estimate,
    estimate_ratio,
    fit_line,
)
from cpr_ext.wings.lab.emulation.strategies import STRATEGIES, EmulatedStrategyName

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

    def to_plain(self) -> dict[str, Any]:
        """Return JSON values; nan becomes None."""
        return _without_nan({**asdict(self), "label": self.label})  # type: ignore[no-any-return]


def to_plain(campaign: Campaign) -> dict[str, Any]:
    """Return the reported values of a campaign and of each of its runs, as JSON values."""
    figures = ("auc", "logloss", "pls", "pls_since_any_save", "overhead_share")
    return {
        "config": campaign.config,
        "facts": campaign.facts,
        "strategies": [summary.to_plain() for summary in summarize(campaign)],
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


def _without_nan(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_nan(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_without_nan(value) for value in tree]
    return None if isinstance(tree, float) and tree != tree else tree
