"""Run the benchmarks of the operations, print them beside their peers, keep them as JSON.

    python bench/run.py [--tiny] [bench_FILE.py ...]

A test whose name begins with ``test_peer_`` is a peer; the ratio of a row is the median time of the
fastest peer of its group over its own: above 1 is faster than every peer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cpr_ext.emulation.machine import describe_machine

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "operations.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="default: all bench_*.py")
    parser.add_argument("--tiny", action="store_true", help="small sizes, nothing is kept")
    options = parser.parse_args()
    rows = summarize(run_pytest(options.files, tiny=options.tiny))
    print_table(rows)
    if not options.tiny:
        keep(rows)


def run_pytest(files: list[str], *, tiny: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # Under pytest-xdist, where a test runs this, the plugin would time nothing.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
        environment["CPR_BENCH_TINY"] = "1" if tiny else "0"
        command = [sys.executable, "-m", "pytest", "-q", "-o", "python_files=bench_*.py"]
        command += ["--benchmark-disable-gc", "--benchmark-quiet"]
        if tiny:
            command += ["--benchmark-max-time=0.01", "--benchmark-min-rounds=2"]
        else:
            command += ["--benchmark-warmup=on"]
        command += [f"--benchmark-json={report}", "-p", "no:cacheprovider", "-o", "timeout=1200"]
        command += files or [str(HERE)]
        subprocess.run(command, env=environment, check=True)
        return json.loads(report.read_text())


def summarize(report: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [
        {
            "group": bench["group"] or Path(bench["fullname"]).stem,
            "name": bench["name"].removeprefix("test_"),
            "median_seconds": bench["stats"]["median"],
            "iqr_seconds": bench["stats"]["iqr"],
            "rounds": bench["stats"]["rounds"],
        }
        for bench in report["benchmarks"]
    ]
    for row in rows:
        peers = [
            peer["median_seconds"]
            for peer in rows
            if peer["group"] == row["group"] and peer["name"].startswith("peer_")
        ]
        if peers and not row["name"].startswith("peer_"):
            row["ratio_to_fastest_peer"] = round(min(peers) / row["median_seconds"], 2)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    group = None
    for row in sorted(rows, key=lambda row: (row["group"], row["median_seconds"])):
        if row["group"] != group:
            group = row["group"]
            print(f"\n{group}")
        ratio = row.get("ratio_to_fastest_peer")
        text = "peer" if ratio is None else f"{ratio:.2f}x the fastest peer"
        milliseconds = 1e3 * row["median_seconds"]
        print(f"  {row['name']:<64}{milliseconds:>10.3f} ms   {text}")


def keep(rows: list[dict[str, Any]]) -> None:
    """Results of benchmarks run now replace their older ones; the others stay."""
    RESULTS.parent.mkdir(exist_ok=True)
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    machine = describe_machine()
    fresh = [{**row, "machine": machine} for row in rows]
    groups = {row["group"] for row in rows}
    kept = [row for row in old["rows"] if row["group"] not in groups]
    RESULTS.write_text(json.dumps({"rows": [*kept, *fresh]}, indent=1) + "\n")
    print(f"\nkept in {RESULTS.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
