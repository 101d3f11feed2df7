"""Run the benchmarks of the operations, print them beside their peers, keep them as JSON.

    python bench/run.py [--tiny] [--folder DIR] [bench_FILE.py ...]

Each bench_*.py offers comparisons: ours beside peers (what a user would pick) and bounds (the
simplest code). The ratio of a row is the median, over rounds, of a peer's time over ours: above 1
is faster.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import paired

from cpr_ext.emulation.machine import describe_machine

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "operations.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="default: all bench_*.py")
    parser.add_argument("--tiny", action="store_true", help="small sizes, nothing is kept")
    parser.add_argument("--folder", help="where to write files (default: the temporary folder)")
    options = parser.parse_args()
    names = sorted(Path(file).stem for file in options.files or HERE.glob("bench_*.py"))
    with tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=options.folder) as folder:
        settings = paired.Settings(options.tiny, Path(folder))
        rows = [row for name in names for row in measure_file(name, settings)]
    if not options.tiny:
        keep(rows, with_older=bool(options.files))


def measure_file(name: str, settings: paired.Settings) -> Iterator[dict[str, Any]]:
    """Measure what a file compares; each comparison is printed as soon as it is done."""
    for comparison in importlib.import_module(name).comparisons(settings):
        rows = paired.measure(comparison, tiny=settings.tiny)
        print_group(rows)
        yield from rows


def print_group(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{rows[0]['group']}")
    for row in sorted(rows, key=lambda row: row["median_seconds"]):
        ratio = row.get("ratio_to_fastest_peer")
        text = row["role"] if ratio is None else f"{ratio:.2f}x the fastest peer"
        milliseconds = 1e3 * row["median_seconds"]
        print(f"  {row['name']:<44}{milliseconds:>10.3f} ms   {text}", flush=True)


def keep(rows: Sequence[dict[str, Any]], *, with_older: bool) -> None:
    """Results of groups run now replace the older ones; ``with_older``: the others stay."""
    RESULTS.parent.mkdir(exist_ok=True)
    machine = describe_machine()
    fresh = [{**row, "machine": machine} for row in rows]
    groups = {row["group"] for row in rows}
    kept = []
    if with_older and RESULTS.exists():
        old = json.loads(RESULTS.read_text())
        kept = [row for row in old["rows"] if row["group"] not in groups]
    RESULTS.write_text(json.dumps({"rows": [*kept, *fresh]}, indent=1) + "\n")
    print(f"\nkept in {RESULTS.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
