"""An emulation in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cpr_ext.wings.lab.emulation.campaign import Campaign
from cpr_ext.wings.lab.emulation.summary import StrategySummary
from cpr_ext.wings.lab.report.estimates import difference, percent, ratio


def describe_scenario(campaign: Campaign) -> str:
    """Return the job and the training, in two sentences."""
    scenario, training = campaign.config["scenario"], campaign.config["training"]
    job = scenario["job"]
    failures = (
        f"{scenario['num_failures']} failures"
        if scenario["num_failures"] is not None
        else f"failures drawn from {describe_model(scenario['failure_model'])}"
    )
    seeds = {key.seed for key in campaign.runs}
    return (
        f"A job of {job['total_hours']:g} hours on {job['num_shards']} embedding shards, "
        f"{failures}, each losing {job['shards_per_failure']} of the shards. Played with "
        f"{training['data']}, model {training['model']}: {len(campaign.runs)} runs, "
        f"{len(seeds)} seeds."
    )


def describe_model(model: dict[str, Any]) -> str:
    """Return a failure model, from its JSON values."""
    match model["model"]:
        case "ExponentialFailures":
            return f"an exponential model with an MTBF of {model['mtbf_hours']:g} hours"
        case "GammaFailures":
            return (
                f"a gamma model of shape {model['shape']:g} with an MTBF of "
                f"{model['shape'] * model['scale_hours']:g} hours"
            )
    return f"{len(model['times_hours'])} recorded times to failure"


def describe_findings(summaries: Sequence[StrategySummary]) -> list[str]:
    """Return what the runs show, most important first."""
    return list(_findings({one.name: one for one in summaries}))


def _findings(by_name: dict[str, StrategySummary]) -> Iterator[str]:
    if full := by_name.get("full"):
        yield f"Full recovery at its optimum costs {percent(full.overhead_share)} % of the job."
    for name in ("partial", "cpr-vanilla", "cpr-mfu", "cpr-ssu", "cpr-scar", "parity"):
        if (one := by_name.get(name)) is None:
            continue
        text = f"{one.label[0].upper()}{one.label[1:]} costs {percent(one.overhead_share)} %"
        if one.overhead_removed is not None:
            text += f", which removes {percent(one.overhead_removed, 1)} % of full recovery's"
        if one.auc_loss is not None:
            text += f"; it loses {difference(one.auc_loss)} thousandths of AUC"
            if one.auc_loss.includes_zero:
                text += ", not distinguishable from zero"
            if one.loss_to_vanilla is not None and name != "cpr-vanilla":
                text += f", {ratio(one.loss_to_vanilla, 2)} of CPR-vanilla's loss"
        yield f"{text}."


def describe_settings(campaign: Campaign) -> list[tuple[str, str]]:
    """Return what must be the same to get the same figures, as name and value."""
    scenario, training = campaign.facts["played"], campaign.config["training"]
    costs = scenario["costs"]
    settings = [
        ("PLS target", f"{scenario['pls_target']:g}"),
        ("fraction r", f"{scenario['fraction']:g}"),
        ("failure model", describe_model(scenario["failure_model"])),
        ("shards", f"{scenario['job']['num_shards']}"),
        ("trainers", f"{scenario['num_trainers']} (for information; losing one takes no rows)"),
        (
            "costs",
            "; ".join(f"{_spaced(name)} {60 * hours:.3g} min" for name, hours in costs.items()),
        ),
    ]
    if (parity := scenario.get("parity")) is not None:
        settings.append(
            (
                "parity",
                f"groups of {parity['group_size']}; {100 * parity['steady_share']:g} % of training "
                f"time at every step; {60 * parity['rebuild_hours']:.3g} min to rebuild a shard, "
                f"{100 * parity['rebuild_stall']:g} % of training speed lost meanwhile",
            )
        )
    if (table_bytes := campaign.config["measured_for_table_bytes"]) is not None:
        settings.append(("costs measured", _describe_measured(campaign, table_bytes)))
    for name, run in _one_run_each(campaign).items():
        if run["save_every_hours"] is not None:
            every = f"every {run['save_every_hours']:.3g} h ({run['every_steps']} steps)"
            settings.append((name, f"saves {100 * run['fraction']:g} % of the rows {every}"))
    settings += [(name, str(value)) for name, value in training.items() if value is not None]
    return settings


def _describe_measured(campaign: Campaign, table_bytes: float) -> str:
    measured = campaign.facts["measured_costs"]
    shards = campaign.facts["played"]["job"]["num_shards"]
    state_bytes = measured["state_bytes"]
    return (
        f"with model {measured['model']} ({state_bytes / 1e9:.2f} GB of rows and their state) on "
        f"this machine and disk, times {table_bytes / shards / state_bytes:.1f}: "
        f"one of {shards} shards of {table_bytes / 1e9:g} GB, all saved and loaded side by side; "
        "rescheduling as given"
    )


def _spaced(name: str) -> str:
    return name.removesuffix("_hours").replace("_", " ")


def _one_run_each(campaign: Campaign) -> dict[str, dict[str, Any]]:
    return {key.strategy: run for key, run in sorted(campaign.runs.items(), reverse=True)}
