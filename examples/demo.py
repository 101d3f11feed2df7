"""Train three times and look: no failure, failures with partial recovery, failures without.

Run by ``make demo``. Each run is the command line shown; the pictures and results go to demo_out/.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cpr_ext.wings.cli.output import size
from cpr_ext.wings.lab.report.run_picture import draw_runs

OUT = Path("demo_out")
# Half of the eight shards fail near the end of the 1,563 steps, and two of them once before.
FAILURES = ["--fail-at", "800:1+6", "--fail-at", "1450:0+2+4+6"]
RUNS = {
    "no failure": ["--priority", "mfu"],
    "partial recovery (MFU)": ["--priority", "mfu", *FAILURES, "--recovery", "partial"],
    "no recovery": ["--priority", "mfu", *FAILURES, "--recovery", "none"],
}


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    results = {}
    for number, (label, options) in enumerate(RUNS.items(), start=1):
        file = OUT / f"run{number}.json"
        command = ["cpr", "train", *options, "--json"]
        print(f"\n[{number}/{len(RUNS)}] {label}\n$ {shlex.join(command)} > {file}", flush=True)
        with file.open("w") as output:
            subprocess.run(
                [sys.executable, "-m", "cpr_ext.wings.cli", *command[1:]], check=True, stdout=output
            )
        results[label] = json.loads(file.read_text())
    print_comparison(results)
    picture = OUT / "demo.png"
    draw_runs(results, picture)
    print(f"\nThe picture of the three runs is {picture}")


def print_comparison(results: dict[str, dict]) -> None:
    print(
        f"\n{'':<24}{'AUC':>8}{'logloss':>10}{'PLS':>8}{'saved':>10}{'stalled':>10}{'recovery':>11}"
    )
    for label, run in results.items():
        recovery_seconds = sum(failure["seconds"] for failure in run["failures"])
        print(
            f"{label:<24}{run['auc']:>8.4f}{run['logloss']:>10.4f}{run['pls']:>8.3f}"
            f"{size(run['snapshots']['bytes']):>10}"
            f"{100 * run['stall_seconds']['total'] / run['seconds']:>8.1f} %"
            f"{1e3 * recovery_seconds:>8.0f} ms"
        )
    whole, partial, none = (run["auc"] for run in results.values())
    print(
        f"\nLosing shards cost {whole - none:.4f} AUC without recovery and {whole - partial:.4f} "
        "with partial recovery."
    )


if __name__ == "__main__":
    main()
