"""A training run as text."""

from __future__ import annotations

from cpr_ext.wings.cli.output import size
from cpr_ext.wings.lab.dlrm.trainer import TrainResult


def format_run(result: TrainResult) -> str:
    """Return the figures of a run, one line each, and a line for each failure."""
    snapshots, stall = result.snapshots, result.stall_seconds
    trained = f"{result.samples:,} in {result.steps:,} steps"
    if result.resumed_from_step:
        trained += f", continued from step {result.resumed_from_step:,}"
    taken = snapshots["base"] + snapshots["partial"]
    share = ""
    if result.seconds and taken:  # the share says little without how often
        every = f"with a snapshot every {result.seconds / taken:.2g} s"
        share = f" ({100 * stall['total'] / result.seconds:.1f} % of it, {every})"
    rows = [
        ("test AUC", f"{result.auc:.4f}"),
        ("test logloss", f"{result.logloss:.4f}"),
        ("samples", trained),
        ("training time", f"{result.seconds:.1f} s, {result.samples_per_second:,.0f} samples/s"),
        (
            "snapshots",
            f"{snapshots['base']} base, {snapshots['partial']} partial, {size(snapshots['bytes'])}",
        ),
        (
            "training blocked",
            f"{stall['total']:.2f} s{share}, at most {1e3 * stall['max']:.0f} ms at a time",
        ),
        ("PLS", f"{result.pls:.4f} (portion of lost samples)"),
    ]
    if (lost := result.share_of_row_updates_lost) is not None:
        rows.append(("row updates lost", f"{lost:.4f} of all"))
    for failure in result.failures:
        shards = "+".join(map(str, failure["shards"]))
        stale = "unknown" if failure["rows_stale"] is None else f"{failure['rows_stale']:,}"
        text = (
            f"step {failure['step']:,}, shards {shards}, recovery {failure['recovery']}: "
            f"{failure['rows_restored']:,} rows restored, {stale} stale, "
            f"{failure['samples_lost']:,} samples lost"
        )
        if failure["samples_retrained"]:
            text += f", {failure['samples_retrained']:,} trained again"
        rows.append(("failure", f"{text}, {1e3 * failure['seconds']:.0f} ms"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
