"""Which stores of a job a command left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cpr_ext.wings.cli.output import echo

if TYPE_CHECKING:
    from cpr_ext.wings.tools.maintenance import JobReport


def show_left_alone(job: JobReport[Any]) -> None:
    """Print which stores of a job nothing was done to, and why."""
    for refused in job.refused:
        echo(f"left as it is: {refused.path}: {refused.reason}")
    for name in job.missing:
        echo(f"missing: {name}")
