"""What ``cpr plan`` plans rounded rows with: options, row sizes, and what each precision gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy import Planner
from cpr_ext.wings.policy.precision import (
    PRECISIONS,
    RowSizes,
    bytes_share,
    expected_restores,
    mean_row_bytes,
    precision_for_restores,
)
from cpr_ext.wings.policy.precision_comparison import PrecisionFigures
from cpr_ext.wings.tools.commands.plan_inputs import InputSource, PlanInputs

# Columns of a row where nothing is given (ours).
EMBEDDING_DIM = 64


def precision_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of rounded rows."""
    options = [
        click.option(
            "--precision",
            type=click.Choice(["auto", *PRECISIONS]),
            help="In which partial snapshots keep the weights of a priority's rows; auto: by the "
            "expected number of restores. Default: float32.",
        ),
        click.option(
            "--embedding-dim",
            type=click.IntRange(min=1),
            help=f"Columns of a row. Default: the store's, else {EMBEDDING_DIM}.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def add_precision(inputs: PlanInputs, given: Mapping[str, Any]) -> None:
    """Choose the precision, with the origin of each figure; nothing without ``--precision``.

    Raises:
        UsageError: row sizes without a precision, or from two sources.
    """
    if given["precision"] is None:
        if given["embedding_dim"] is not None:
            raise UsageError("--embedding-dim is of use only with --precision")
        return
    dim, origin = given["embedding_dim"], "given"
    if inputs.row_sizes and dim is not None:
        raise UsageError("--embedding-dim and --store both give the columns of a row; pass one")
    if not inputs.row_sizes:
        if dim is None:
            dim, origin = EMBEDDING_DIM, "assumed"
        inputs.row_sizes = (RowSizes(1, dim),)
        text = f"{dim} columns, {inputs.row_sizes[0].state_bytes:g} bytes of state"
        inputs.sources.append(InputSource("a row", text, f"{origin}; assumed"))
    restores = expected_restores(inputs.job, inputs.failures.mean_hours)
    by_rule = precision_for_restores(restores)
    name, origin = given["precision"], "given"
    if name == "auto":
        name, origin = by_rule, "by the expected restores"
    inputs.precision = name
    inputs.row_share = bytes_share(inputs.row_sizes, name)
    inputs.sources.append(InputSource("partial snapshots", name, origin))
    taken = mean_row_bytes(inputs.row_sizes, name)
    exact = mean_row_bytes(inputs.row_sizes, "float32")
    inputs.notes.append(
        f"CPR-SCAR, -MFU and -SSU save rows in {name}: {taken:.4g} bytes a row instead of "
        f"{exact:.4g}. Saves of all rows stay float32, and 'formula' too. The time of a save is "
        "taken to grow with its bytes; cpr_ext writes in the background, where it hardly does."
    )
    inputs.notes.append(
        f"A row is restored {restores:.3g} times in the job on average. Up to 5,780 times int8 is "
        f"enough, derived from Check-N-Run's rule (as recalled), else float16: {by_rule} here."
    )


def format_precisions(planner: Planner, inputs: PlanInputs) -> str:
    """Return a line per precision, ``*`` at the one that is planned with."""
    head = ("partial snapshots in", "a row", "written", "overhead", "or save every", "PLS then")
    rows = [head, *(_cells(figures, inputs) for figures in compare(planner, inputs))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    )


def compare(planner: Planner, inputs: PlanInputs) -> tuple[PrecisionFigures, ...]:
    """Return the figures of every precision; none without ``--precision``."""
    from cpr_ext.wings.policy.precision_comparison import compare_precisions

    if inputs.precision is None:
        return ()
    return compare_precisions(planner, inputs.target_pls, inputs.row_sizes)


def _cells(figures: PrecisionFigures, inputs: PlanInputs) -> tuple[str, str, str, str, str, str]:
    from cpr_ext.wings.tools.commands.plan_table import format_hours

    return (
        ("* " if figures.precision == inputs.precision else "  ") + figures.precision,
        f"{figures.row_bytes:.4g} B",
        f"{100 * figures.written_share:.3g} %",
        f"{100 * figures.overhead_fraction:.3g} %",
        format_hours(figures.save_every_hours),
        f"{figures.pls:.4f}",
    )
