"""``cpr emulate``: play a cluster's failures while really training; what does each strategy cost?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command()
@click.option("--preset", type=click.Choice(["abstract-56h", "production-50h"]), default="abstract-56h")
@click.option("--data", default="synthetic")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--seeds", type=int, default=10)
@click.option("--steps", type=int)
@click.option("--jobs", type=int)
def emulate(**given: Any) -> None:
    """Play."""
    from cpr_ext.emulation.emulation import emulate as run
    from cpr_ext.emulation.play import Training
    from cpr_ext.emulation.presets import PRESETS
    from cpr_ext.emulation.strategies import STRATEGIES
    run(PRESETS[given["preset"]], Training(given["data"], max_steps=given["steps"]), given["out"],
        strategies=list(STRATEGIES), seeds=range(given["seeds"]), num_workers=given["jobs"],
        observe=lambda s: click.echo(f"{s.samples/s.total_samples:.2f} {s.runs}/{s.total_runs} {s.message}") if s.message else None)
