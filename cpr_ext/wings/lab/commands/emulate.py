"""``cpr emulate``: a cluster's failures, played on this machine while really training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpr_ext.wings.cli.numbers import Amount
from cpr_ext.wings.cli.output import Bar, json_option, print_table
from cpr_ext.wings.cli.required import require_for_training, require_picture
from cpr_ext.wings.tools.commands.plan_inputs import parity_costs, parity_options

if TYPE_CHECKING:
    from cpr_ext.wings.lab.emulation.campaign import Campaign
    from cpr_ext.wings.lab.emulation.scenario import Scenario

_EPILOG = """\b
Examples:
  cpr emulate
  cpr emulate --preset abstract-56h --data movietweetings:DIR --seeds 20
  cpr emulate --preset production-50h --strategy full --strategy cpr-mfu
  cpr emulate --pls 0.01 --save-minutes 1 --plot emulation.png

Running the same command again continues where it stopped, also after kill -9; with more --seeds or
another --strategy it adds those runs."""

_POSITIVE = Amount(above=0)


@click.command(epilog=_EPILOG)
@click.option(
    "--preset",
    type=click.Choice(["abstract-56h", "production-50h"]),
    default="abstract-56h",
    show_default=True,
    help="The job, its failures and their costs; the options below change single figures of it.",
)
@click.option(
    "--data",
    default="synthetic",
    show_default=True,
    metavar="SOURCE",
    help="What is trained: synthetic, movietweetings:PATH, or criteo:PATH with --steps.",
)
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    type=click.Choice(
        ["no-failure", "full", "partial", "cpr-vanilla", "cpr-scar", "cpr-mfu", "cpr-ssu", "parity"]
    ),
    help="Play these only; may be given several times. no-failure is always played, for "
    "comparison. Default: all; parity needs --parity-group-size.",
)
@click.option("--seeds", type=click.IntRange(min=1), default=10, show_default=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the runs.  [default: runs/PRESET-DATA]",
)
@click.option(
    "--model",
    type=click.Choice(["tiny", "kaggle", "terabyte"]),
    default="tiny",
    show_default=True,
    help="Widths of the model that is trained.",
)
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over the data.")
@click.option("--steps", type=click.IntRange(min=1), help="Stop after so many steps.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples per step.")
@click.option("--hours", type=_POSITIVE, help="Useful training time of the job.")
@click.option("--shards", type=click.IntRange(min=1), help="Embedding servers, one shard each.")
@click.option("--shards-lost", type=click.IntRange(min=1), help="Shards lost at each failure.")
@click.option("--mtbf-hours", type=_POSITIVE, help="Mean time between failures of the job.")
@click.option(
    "--failures",
    "num_failures",
    type=click.IntRange(min=0),
    help="Exactly so many failures, at hours drawn uniformly, instead of drawn intervals.",
)
@click.option("--pls", "pls_target", type=float, help="PLS from which CPR derives its interval.")
@click.option("--fraction", type=float, help="Share of the rows that one prioritised save takes.")
@click.option("--save-minutes", type=_POSITIVE, help="How long a save of all rows blocks training.")
@click.option("--load-minutes", type=Amount(0), help="Loading all shards.")
@click.option("--load-shard-minutes", type=Amount(0), help="Loading lost shards.")
@click.option("--reschedule-minutes", type=Amount(0), help="Replacing a node.")
@parity_options
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Runs side by side.  [default: as many as cores]",
)
@json_option
@click.option(
    "--plot",
    "plot_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the overhead by strategy, and the accuracy lost over PLS (PNG, SVG or PDF).",
)
@click.option("--quiet", is_flag=True, help="No progress bar.")
def emulate(**given: Any) -> None:
    """Train under emulated failures, once per strategy and seed, and compare what it costs.

    Each run really trains the model, and really loses and recovers rows. The clock of a cluster's
    job charges its saves and failures what they would cost there. The defaults take a few minutes
    on two cores and need no data.
    """
    require_picture("cpr emulate", given["plot_file"])
    require_for_training("cpr emulate", given["data"])
    # Imported here, so that --help and wrong options need not wait for torch.
    from cpr_ext.wings.lab.emulation.emulation import emulate as play
    from cpr_ext.wings.lab.emulation.run_strategy import Training
    from cpr_ext.wings.lab.emulation.scenario import STRATEGIES
    from cpr_ext.wings.lab.emulation.summary import to_json

    data = given["data"]
    default = f"{given['preset']}-{data.partition(':')[0]}"
    out = given["out"] or Path("runs") / default
    asked = given["strategies"] or [name for name in STRATEGIES if name != "parity"]
    with_parity = ["parity"] if given["parity_group_size"] is not None else []
    asked = ("no-failure", *asked, *with_parity)
    training = Training(
        data, given["model"], given["epochs"], given["batch_size"], given["steps"]
    )  # fmt: skip
    with Bar(" runs", is_shown=not given["quiet"]) as bar:
        campaign = play(
            _scenario(given),
            training,
            out,
            strategies=[name for name in STRATEGIES if name in asked],
            seeds=range(given["seeds"]),
            num_workers=given["jobs"],
            observe=bar.show,
        )
    if given["plot_file"] is not None:
        from cpr_ext.wings.lab.report.emulation_picture import draw_emulation

        draw_emulation(campaign, given["plot_file"])
    if given["as_json"]:
        click.echo(to_json(campaign), nl=False)
    else:
        _show(campaign)


def _scenario(given: dict[str, Any]) -> Scenario:
    """Return the preset, with what was given instead."""
    from cpr_ext.wings.lab.emulation.scenario import find_scenario

    scenario = find_scenario(given["preset"])
    job = {"total_hours": "hours", "num_shards": "shards", "shards_per_failure": "shards_lost"}
    costs = {
        "save_hours": "save_minutes",
        "load_hours": "load_minutes",
        "load_shard_hours": "load_shard_minutes",
        "reschedule_hours": "reschedule_minutes",
    }
    changes = {
        name: given[name]
        for name in ("num_failures", "mtbf_hours", "pls_target", "fraction")
        if given[name] is not None
    }
    if given["mtbf_hours"] is not None and given["num_failures"] is None:
        changes["num_failures"] = None
    new_job = replace(scenario.job, **_given(given, job))
    minutes_given = _given(given, costs).items()
    new_costs = replace(scenario.costs, **{name: value / 60 for name, value in minutes_given})
    changes["parity"], _ = parity_costs(given, new_job, new_costs)
    return replace(scenario, job=new_job, costs=new_costs, **changes)


def _given(given: dict[str, Any], options: dict[str, str]) -> dict[str, Any]:
    return {name: given[option] for name, option in options.items() if given[option] is not None}


def _show(campaign: Campaign) -> None:
    from cpr_ext.wings.lab.emulation.summary import spelled, summarize

    head = ("", "seeds", "overhead, %", "PLS", "AUC loss, 1e-3", "of vanilla's", "removed, %")
    rows = [
        (
            one.label,
            len(one.seeds),
            spelled(one.overhead_share, 100),
            spelled(one.pls, digits=4),
            spelled(one.auc_loss, 1000),
            spelled(one.loss_to_vanilla),
            spelled(one.overhead_removed, 100, digits=1),
        )
        for one in summarize(campaign)
    ]
    print_table(head, rows)
    click.echo(
        "\nMeans over seeds, in brackets 95 % intervals. AUC loss is against the run of the same "
        f"seed without failure.\nRuns are in {campaign.directory}."
    )
