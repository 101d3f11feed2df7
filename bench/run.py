"""Run the benchmarks of the operations, print them beside their peers, keep them as JSON.

    python bench/run.py [--tiny] [--folder DIR] [bench_FILE.py ...]

Each bench_*.py offers comparisons: ours beside peers (what a user would pick) and bounds (the
simplest code). The ratio of a row is the median, over rounds, of a peer's time over ours: above 1
is faster.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import paired
from results import Results, Row, keep, parser_of, standing

from cpr_ext.wings.lab.emulation.machine import describe_machine

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("files", nargs="*", help="default: all bench_*.py")
    options = parser.parse_args()
    names = sorted(Path(file).stem for file in options.files or HERE.glob("bench_*.py"))
    with tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=options.folder) as folder:
        settings = paired.Settings(options.tiny, Path(folder))
        rows = [row for name in names for row in measure_file(name, settings)]
    if not options.tiny:
        machine = describe_machine()  # of each row: some may be older
        rows = [{**row, "machine": machine} for row in rows]
        keep("operations", with_older(rows) if options.files else rows)


def measure_file(name: str, settings: paired.Settings) -> Iterator[Row]:
    """Measure what a file compares; each comparison is printed as soon as it is done."""
    for comparison in importlib.import_module(name).comparisons(settings):
        rows = paired.measure(comparison, tiny=settings.tiny)
        print_group(rows)
        yield from rows


def print_group(rows: Sequence[Row]) -> None:
    print(f"\n{rows[0]['group']}")
    for row in sorted(rows, key=lambda row: row["median_seconds"]):
        milliseconds = 1e3 * row["median_seconds"]
        print(f"  {row['name']:<44}{milliseconds:>10.3f} ms   {standing(row)}", flush=True)


def with_older(rows: Sequence[Row]) -> list[Row]:
    """These and the results before of groups that were not run now."""
    groups = {row["group"] for row in rows}
    older = Results().rows("operations")
    return [*(row for row in older if row["group"] not in groups), *rows]


if __name__ == "__main__":
    main()
