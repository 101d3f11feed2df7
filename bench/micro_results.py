"""The microbenchmarks that are kept, next to the paired rounds of the same stages.

`make microbench PYTEST="--benchmark-storage=bench/results/micro --benchmark-save=NAME"` keeps a
run. Both time the same calls; the rounds alternate with peers, the microbenchmarks do not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from results import FOLDER, Results, Row

MICRO = FOLDER / "micro"


@dataclass(frozen=True)
class Pair:
    """A stage as each of the two times it.

    Attributes:
        micro: the name of the microbenchmark.
        group, name: of the contender in the paired rounds.
        difference: why the two may differ; empty: they do the same.
    """

    micro: str
    group: str
    name: str
    difference: str = ""


_TABLE_SIZE = "tables of another size: times are of 500 MB"
PAIRS = (
    *(
        Pair(
            f"test_count[cpu-{skew}]",
            f"count 26 x 2048 lookups, {skew}",
            f"count_lookups[{skew}-1-AccessCounter]",
        )
        for skew in ("uniform", "zipf")
    ),
    *(
        Pair(
            f"test_select[cpu-{scores}]",
            f"top 500000 of 4000000 {scores}",
            f"top_rows[{scores}-1]",
            "the tracker's counts are below 100, and it selects with one thread",
        )
        for scores in ("zipf_counts", "poisson_counts")
    ),
    Pair("test_gather", "gather 500000 rows of 256 bytes", "gather_cpr_ext"),
    Pair("test_scatter", "scatter 500000 rows of 256 bytes", "scatter_cpr_ext"),
    *(Pair(f"test_checksum[{k}]", "checksum 4 MiB", f"crc32c[{k}]") for k in ("best", "portable")),
    Pair("test_write[cpu]", "save 2000 MB", "save_cpr_ext", _TABLE_SIZE),
    Pair("test_recovery[cpu]", "recover 2000 MB", "recover_cpr_ext", _TABLE_SIZE),
)


@dataclass(frozen=True)
class Agreement:
    """The two times of a stage, in seconds: each its median and its middle half."""

    pair: Pair
    micro: tuple[float, float, float]
    paired: tuple[float, float, float]

    @property
    def holds(self) -> bool:
        """Whether the middle halves overlap."""
        return self.micro[0] <= self.paired[2] and self.paired[0] <= self.micro[2]


def newest_run() -> dict[str, Any] | None:
    """Return the newest run that is kept; None: there is none."""
    files = sorted(MICRO.rglob("*.json"), key=lambda path: path.name)
    return json.loads(files[-1].read_text()) if files else None


def agreements(run: dict[str, Any], results: Results) -> Iterator[Agreement]:
    """Yield each stage that both have timed."""
    benchmarks = {each["name"]: each for each in run["benchmarks"]}
    for pair in PAIRS:
        rows = [r for r in results.rows("operations", name=pair.name) if r["group"] == pair.group]
        if pair.micro in benchmarks and rows:
            found = benchmarks[pair.micro]
            stats = found["stats"]
            yield Agreement(
                pair,
                (stats["q1"], stats["median"], stats["q3"]),
                _spread(rows[0], scale=_scale(found, pair)),
            )


def _spread(row: Row, *, scale: float) -> tuple[float, float, float]:
    median, half = row["median_seconds"], row["iqr_seconds"] / 2
    return scale * (median - half), scale * median, scale * (median + half)


def _scale(found: dict[str, Any], pair: Pair) -> float:
    """Return by how much less a microbenchmark moves than the rounds."""
    if not pair.group.endswith(" MB"):
        return 1.0
    return found["extra_info"]["bytes"] / (1e6 * float(pair.group.split()[-2]))
