"""``cpr plan``: what failures will cost a job, and how to save."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from cpr_ext.wings.cli.numbers import Amount
from cpr_ext.wings.cli.output import json_option, print_table, to_json
from cpr_ext.wings.policy import Plan, Planner
from cpr_ext.wings.policy.costs import duration
from cpr_ext.wings.tools.commands.plan_inputs import PlanInputs, gather, parity_options

_EPILOG = """\b
Where to begin:
  cpr plan --preset abstract-56h          the paper's own scenario
  cpr plan --preset production-50h        its production run, with costs assumed by us
\b
Your job, from figures you know:
  cpr plan --job-hours 120 --shards 16 --mtbf-hours 20 --save-minutes 4 --load-minutes 3 \\
           --reschedule-minutes 5 --target-pls 0.05
\b
Your job, from a log of earlier ones:
  cpr plan --job-hours 120 --failure-log jobs.csv --nodes 36 --shards 16 \\
           --save-minutes 4 --load-minutes 3
\b
The log is a CSV file with a line of column names: hours (how long a job ran), failed (1: a failure
ended it; 0: it ended otherwise), and nodes if jobs ran on different numbers of them.
\b
PLS, the portion of lost samples, is the share of training whose effect failures take away from the
tables. Full recovery has none, and pays for it by training again. What PLS costs in accuracy
depends on the model; lower is safer and dearer. The paper's abstract is reproduced with 0.1."""


@click.command(epilog=_EPILOG)
@click.option("--preset", metavar="NAME", help="abstract-56h or production-50h; options override.")
@click.option("--job-hours", type=float, help="Useful training time of the job.")
@click.option("--shards", type=int, help="Servers that the embedding tables are cut over.")
@click.option("--shards-per-failure", type=int, help="Shards that one failure takes. Default: 1.")
@click.option("--mtbf-hours", type=float, help="Mean time between failures of the whole job.")
@click.option(
    "--failure-log",
    type=click.Path(dir_okay=False),
    metavar="CSV",
    help="Fit the failures to a log of jobs instead.",
)
@click.option("--nodes", type=int, help="Nodes of the planned job, if the log has jobs of others.")
@click.option("--save-minutes", type=float, help="Training stands still this long to save all.")
@click.option("--load-minutes", type=float, help="To load all shards.")
@click.option(
    "--load-shard-minutes", type=float, help="To load those one failure took. Default: as all."
)
@click.option("--reschedule-minutes", type=float, help="To replace failed nodes. Default: 0.")
@click.option("--target-pls", type=float, help="PLS you accept, above 0, at most 1. Default: 0.02.")
@click.option(
    "--fraction",
    type=float,
    default=0.125,
    show_default=True,
    help="Share of the rows of large tables that a priority saves at a time.",
)
@parity_options
@click.option(
    "--table-gb",
    type=Amount(above=0),
    help="All rows with their optimizer state (GB: 10^9 bytes): gives the time to rebuild.",
)
@json_option
def plan(**given: Any) -> None:
    """Plan a job: full or partial recovery, how often to save, which rows first, at what cost.

    Compares strategies by their overhead (saving, loading, lost computation, rescheduling) and by
    the share of training they lose (PLS), and recommends one. With --parity-group-size, parity in
    peers' memory is among them.
    """
    inputs = gather(given)
    made = _planner(inputs, inputs.mtbf_hours, given).plan(inputs.target_pls)
    notes = [*made.notes, *inputs.notes, *_uncertainty(inputs, given)]
    if given["as_json"]:
        inputs_of = {"inputs": [asdict(source) for source in inputs.sources]}
        more = {"recommended": made.recommended.name, "notes": notes}
        click.echo(to_json({**inputs_of, **asdict(made), **more}))
        return
    width = max(len(source.what) for source in inputs.sources)
    for source in inputs.sources:
        click.echo(f"{source.what:<{width}}  {source.value}  [{source.origin}]")
    click.echo()
    _print_strategies(made)
    click.echo(f"\n{_wrapped(made.reason)}\n")
    for note in notes:
        click.echo(_wrapped(note, "- "))


def _planner(inputs: PlanInputs, mtbf_hours: float, given: dict[str, Any]) -> Planner:
    return Planner(
        inputs.job, inputs.costs, mtbf_hours, fraction=given["fraction"], parity=inputs.parity
    )


def _print_strategies(plan: Plan) -> None:
    """Print a line per strategy; overhead and its parts in percent of useful training time.

    ``*`` marks the recommended strategy, ``formula`` is the paper's overhead.
    """
    parts = {
        "save": "save_hours",
        "load": "load_hours",
        "lost": "lost_computation_hours",
        "resched.": "reschedule_hours",
    }
    if any(strategy.fallback_chance is not None for strategy in plan.strategies):
        parts["parity"] = "parity_hours"
    print_table(
        ("", "save every", "overhead", *parts, "formula", "PLS"),
        [
            (
                ("* " if strategy is plan.recommended else "  ") + strategy.name,
                duration(strategy.save_every_hours),
                f"{_percent(strategy.overhead_fraction)} %",
                *(
                    _percent(getattr(strategy.expected.overhead, part) / plan.job.total_hours)
                    for part in parts.values()
                ),
                f"{_percent(strategy.formula_overhead_fraction)} %",
                f"{strategy.expected.pls:.4f}",
            )
            for strategy in plan.strategies
        ],
    )


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.2f}" if percent >= 0.1 or not percent else f"{percent:.2g}"


def _uncertainty(inputs: PlanInputs, given: dict[str, Any]) -> list[str]:
    """Return the recommendations at the ends of a fitted MTBF's confidence interval."""
    if (fit := inputs.fit) is None:
        return []
    said = []
    for mtbf_hours in (fit.low_hours, fit.high_hours):
        best = _planner(inputs, mtbf_hours, given).plan(inputs.target_pls).recommended
        said.append(
            f"{best.name} every {duration(best.save_every_hours)} "
            f"({100 * best.overhead_fraction:.2g} % overhead)"
        )
    return [
        f"At the ends of the MTBF's 95 % interval, {fit.low_hours:.3g} and {fit.high_hours:.3g} h: "
        f"{said[0]}; {said[1]}."
    ]


def _wrapped(text: str, lead: str = "") -> str:
    return click.wrap_text(text, width=100, initial_indent=lead, subsequent_indent=" " * len(lead))
