"""Runs a measurement of accuracy seed by seed, and keeps each in a file of bench/results."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cpr_ext.lab.emulation.machine import describe_machine
from cpr_ext.lab.emulation.run_strategy import Training

RESULTS = Path(__file__).resolve().parent / "results"


def command(script: str) -> str:
    """Return how a script was called, without the folder of the data."""
    given = [re.sub(r"^(movietweetings|criteo):.*", r"\1:DIR", word) for word in sys.argv[1:]]
    return shlex.join(["python", f"bench/{script}", *given])


def run_seeds(
    script: str,
    doc: str,
    play: Callable[[Training, int], dict[str, Any]],
    summarize: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Play the seeds that the file of results lacks, and return the summary of all.

    Args:
        script: its file; the results have its name and that of the data.
        doc: what the script says of itself.
        play: measures a seed; its result has the ``"seed"``.
        summarize: makes the rows of a summary.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--data", default="synthetic", help="as for cpr emulate")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so long")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    training = Training(options.data)
    file = RESULTS / f"{Path(script).stem}_{options.data.partition(':')[0]}.json"
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    done = {run["seed"] for run in runs}
    for seed in range(options.seeds):
        if seed in done or time.monotonic() - started > 60 * options.minutes:
            continue
        runs.append(play(training, seed))
        print(f"seed {seed}: {time.monotonic() - started:.0f} s", flush=True)
        plain = {
            "command": command(Path(script).name),
            "machine": describe_machine(),
            "summary": summarize(runs),
        }
        head = json.dumps(plain, indent=1).removesuffix("\n}")
        lines = ",\n  ".join(json.dumps(run) for run in runs)
        file.write_text(f'{head},\n "runs": [\n  {lines}\n ]\n}}\n')
    return summarize(runs)
