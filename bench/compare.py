"""What got slower since: two files of results of operations, row by row.

    python bench/compare.py BEFORE.json [NOW.json]
    git show REV:bench/results/operations.json | python bench/compare.py -

The machine may be slower as a whole, or its neighbours busier: what all peers and bounds of a group
that are in both files got slower by is not held against a row. It got slower if it did by more than
both spreads (the ranges of the middle halves) and by more than a tenth. Ends with 1 if any row did.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import FOLDER, Row

#: Less than so much slower is nothing, however small the spreads are.
LEAST = 0.1


@dataclass(frozen=True)
class Change:
    """A row that is in both files.

    Attributes:
        slower: its time now over its time before, less what all others of its group share.
        noise: by how much that may be off.
    """

    group: str
    name: str
    before_seconds: float
    now_seconds: float
    slower: float
    noise: float

    @property
    def is_slower(self) -> bool:
        return self.slower > 1 + max(self.noise, LEAST)


def changes(before: Sequence[Row], now: Sequence[Row]) -> Iterator[Change]:
    """Ours, as far as both files have it, in the order of ``now``."""
    old = {_key(row): row for row in before}
    for row in now:
        was = old.get(_key(row))
        if was is None or not _is_ours(was):
            continue
        yield Change(
            row["group"],
            row["name"],
            was["median_seconds"],
            row["median_seconds"],
            row["median_seconds"] / was["median_seconds"] / _drift(row["group"], old, now),
            sum(each["iqr_seconds"] / each["median_seconds"] for each in (row, was)),
        )


def _drift(group: str, old: dict[tuple[str, str], Row], now: Sequence[Row]) -> float:
    """By how much every other of a group got slower at the least; 1 if any did not."""
    others = [row for row in now if row["group"] == group and not _is_ours(row)]
    ratios = [
        row["median_seconds"] / old[_key(row)]["median_seconds"]
        for row in others
        if _key(row) in old
    ]
    return max(1.0, min(ratios, default=1.0))


def _key(row: Row) -> tuple[str, str]:
    if _is_ours(row):
        return row["group"], row["name"]
    # Results from before roles told peers by their names, with parameters.
    return row["group"], row["name"].removeprefix("peer_").partition("[")[0]


def _is_ours(row: Row) -> bool:
    return row.get("role", "peer" if row["name"].startswith("peer_") else "ours") == "ours"


def _load(path: str) -> Any:
    text = sys.stdin.read() if path == "-" else Path(path).read_text()
    return json.loads(text)["rows"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", help="a file of results; - reads one from standard input")
    parser.add_argument("now", nargs="?", default=str(FOLDER / "operations.json"))
    options = parser.parse_args()
    found = list(changes(_load(options.before), _load(options.now)))
    slower = [change for change in found if change.is_slower]
    for change in slower:
        print(
            f"{change.group}: {change.name} takes {change.slower:.2f} times as long "
            f"(noise {change.noise:.2f}): {1e3 * change.before_seconds:.3f} ms before, "
            f"{1e3 * change.now_seconds:.3f} ms now"
        )
    print(f"{len(found)} rows compared, {len(slower)} slower")
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    main()
