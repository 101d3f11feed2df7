"""``cpr train``: train the reference model, lose shards, recover, report the cost."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpr_ext.errors import UsageError
from cpr_ext.wings.cli.output import Bar, json_option, print_json
from cpr_ext.wings.cli.required import require_for_training, require_picture

if TYPE_CHECKING:
    from cpr_ext import Priority
    from cpr_ext.wings.lab.dlrm.trainer import TrainingProgress, TrainResult

_EPILOG = """\b
Examples:
  cpr train
  cpr train --fail-at 700:0+2+4+6 --recovery partial --priority mfu --store runs/a
  cpr train --data movietweetings:DIR --fail-at 940:1 --plot run.png --json > run.json
  cpr train --data criteo:DIR/train.txt --preset kaggle --every-steps 1000 --store runs/b

Running the same command on a --store again continues from it, also after kill -9."""


@click.command(epilog=_EPILOG)
@click.option(
    "--data",
    default="synthetic",
    show_default=True,
    metavar="SOURCE",
    help="synthetic, criteo:PATH (train.txt, day_N, .gz or a folder) or movietweetings:PATH.",
)
@click.option(
    "--preset",
    type=click.Choice(["tiny", "kaggle", "terabyte"]),
    default="tiny",
    show_default=True,
    help="Widths of the model; kaggle holds 2.2 GB of tables, terabyte 12 GB and more.",
)
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over the data.")
@click.option("--steps", type=click.IntRange(min=1), help="Stop after so many steps in all.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples per step.")
@click.option(
    "--shards",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Row ranges into which each table is cut; each can be lost and recovered on its own.",
)
@click.option(
    "--priority",
    type=click.Choice(["mfu", "ssu", "scar", "all", "none"]),
    default="mfu",
    show_default=True,
    help="Rows a snapshot saves first: most used, sampled, most changed, all changed; none: no "
    "snapshots.",
)
@click.option(
    "--fraction",
    type=float,
    default=0.125,
    show_default=True,
    help="Share of the rows of each large table that one snapshot saves (mfu, ssu, scar).",
)
@click.option(
    "--every-steps",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Training steps between snapshots.",
)
@click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the snapshots. Without it they go to a temporary one, removed at the end.",
)
@click.option(
    "--fail-at",
    multiple=True,
    metavar="STEP:SHARD[+SHARD...]",
    help="Lose these shards after this step. May be given several times.",
)
@click.option(
    "--recovery",
    type=click.Choice(["partial", "full", "none"]),
    default="partial",
    show_default=True,
    help="partial: restore only the lost shards; full: return to the last common point "
    "with all shards and train again; none: continue with the rows that remain.",
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="DEVICE",
    help="Where to train: cpu, cuda or cuda:N.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help="Threads of torch. Default: 1 for the tiny preset, whose steps are too short to share, "
    "else all cores.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@json_option
@click.option(
    "--plot",
    "plot_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the run to this PNG: loss over samples, failures, snapshots.",
)
@click.option("--quiet", is_flag=True, help="No progress bar.")
def train(**given: Any) -> None:
    """Train a recommendation model (DLRM) with prioritized snapshots, and lose shards on purpose.

    The defaults take well under a minute on two cores and need no data.
    """
    require_picture("cpr train", given["plot_file"])
    require_for_training("cpr train", given["data"])
    priority = _priority(given["priority"], given["fraction"])
    with ExitStack() as stack:
        store = given["store"]
        if store is None and priority is not None:
            store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cpr-store-")))
        result = _train(given, priority, store)
    if given["store"] is None:
        result.store = None
    _show(result, given)


def _priority(name: str, fraction: float) -> Priority | None:
    import cpr_ext

    match name:
        case "mfu":
            return cpr_ext.MostFrequentlyUsed(fraction)
        case "ssu":
            return cpr_ext.SubSampledUsed(fraction)
        case "scar":
            return cpr_ext.LargestChange(fraction)
        case "all":
            return cpr_ext.AllRows()
    return None


def _device(name: str) -> str:
    import torch

    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"device is {name!r}; allowed: cpu, cuda, cuda:N")
    return name


def _train(given: dict[str, Any], priority: Priority | None, store: Path | None) -> TrainResult:
    # Imported here, so that --help and wrong options need not wait for torch.
    import torch

    from cpr_ext.wings.lab.dlrm.failures import parse_failure
    from cpr_ext.wings.lab.dlrm.presets import find_preset
    from cpr_ext.wings.lab.dlrm.sources import open_source
    from cpr_ext.wings.lab.dlrm.trainer import Trainer, TrainOptions

    failures = tuple(parse_failure(text, given["shards"]) for text in given["fail_at"])
    preset = find_preset(given["preset"])
    source = open_source(given["data"], preset, given["seed"])
    if threads := given["threads"] or (1 if preset.name == "tiny" else None):
        torch.set_num_threads(threads)
    changes = {name: given[name] for name in ("epochs", "batch_size") if given[name] is not None}
    options = TrainOptions(
        settings=dataclasses.replace(source.recommended, **changes),
        store=store if priority is not None else None,
        priority=priority,
        every_steps=given["every_steps"],
        max_steps=given["steps"],
        failures=failures,
        recovery=given["recovery"],
        num_shards=given["shards"],
        seed=given["seed"],
        device=_device(given["device"]),
    )
    with Bar(" samples", is_shown=not given["quiet"]) as bar:

        def observe(progress: TrainingProgress) -> None:
            now = progress.metrics
            loss = "-" if math.isnan(progress.loss) else f"{progress.loss:.4f}"
            taken = f"{now.base_snapshots + now.partial_snapshots} snapshots"
            more = f"loss {loss}, {taken}, stalled {now.stall_seconds:.2f} s"
            bar.show(progress.num_samples, progress.total_samples, progress.message, more)

        return Trainer(preset, source, options, observe).run()


def _show(result: TrainResult, given: dict[str, Any]) -> None:
    from cpr_ext.wings.lab.report.run_table import format_run

    for warning in result.warnings:
        click.echo(f"Warning: {warning}", err=True)
    if math.isnan(result.auc):
        text = "Warning: the AUC is not defined: the test samples are not of both classes"
        click.echo(text, err=True)
    if given["plot_file"] is not None:
        from cpr_ext.wings.lab.report.run_picture import draw_runs

        draw_runs({given["recovery"]: dataclasses.asdict(result)}, given["plot_file"])
    if given["as_json"]:
        print_json(result)
        return
    click.echo(format_run(result))
    if result.store is not None:
        click.echo(f"\nSnapshots are in {result.store}; the same command continues from there.")
