"""What it costs training to find out whether a snapshot is complete.

    python bench/check_costs.py [--points 4] [--tiny]

One DLRM (`kaggle`: 2.3 GB of tables) in one process, at batches of 128 and 2048. First a base
snapshot is read back while training runs. Then partial snapshots of all changed rows are checked:
how long that takes, the share of the time inside of comparisons, and the ratio of a step meanwhile
to one after it. Last the inventory is looked up as at a snapshot. Keeps
bench/results/check_costs.json.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from results import keep, parser_of, show
from training import Protected, Run, seconds_of

import cpr_ext
from cpr_ext.saving.claims import Claims


def read_back(protected: Protected) -> dict[str, Any]:
    """Train while a base snapshot is read back, and after it."""
    protected.ask()
    protected.train_until_saved()
    reading = protected.checkpointer._saving._saver.outcomes.read_back
    assert reading is not None
    during: list[float] = []
    started = time.perf_counter()
    while not reading.has_ended:
        during.append(seconds_of(protected.train_step))
    seconds = time.perf_counter() - started
    assert reading.damage is None, reading.damage
    after = [seconds_of(protected.train_step) for _ in range(max(len(during) // 4, 8))]
    ratio = statistics.median(during or after) / statistics.median(after)
    return {"part": "read back", "seconds": seconds, "ratio": round(ratio, 4)}


class Timed:
    """Seconds inside of comparisons, of slices and of rows that are about to change."""

    def __init__(self) -> None:
        self.slices = self.changing = 0.0

    def of(self, method: Any, name: str) -> Any:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                setattr(self, name, getattr(self, name) + time.perf_counter() - started)

        return timed


def checks(protected: Protected, points: int) -> dict[str, Any]:
    """Train while points are checked, and as many steps after each."""
    claims = protected.checkpointer._saving._saver.claims
    timed, seconds, ratios = Timed(), [], []
    slices, changing = Claims._advance, Claims._compare_changing
    Claims._advance = timed.of(slices, "slices")  # type: ignore[method-assign]
    Claims._compare_changing = timed.of(changing, "changing")  # type: ignore[method-assign]
    total = 0.0
    for _ in range(points):
        protected.ask()
        protected.train_until_saved()
        during: list[float] = []
        while claims._checked is not None:
            during.append(seconds_of(protected.train_step))
        after = [seconds_of(protected.train_step) for _ in during[:200]]
        seconds.append(sum(during))
        total += sum(during)
        ratios.append(statistics.median(during) / statistics.median(after) if during else 1.0)
    Claims._advance = slices  # type: ignore[method-assign]
    Claims._compare_changing = changing  # type: ignore[method-assign]
    return {
        "part": f"checks, batch {protected.run.batch_size}",
        "points": points,
        "complete": protected.checkpointer.metrics.checks,
        "seconds": statistics.median(seconds),
        "share_of_slices": round(timed.slices / total, 5) if total else 0.0,
        "share_of_changing": round(timed.changing / total, 5) if total else 0.0,
        "ratio": round(statistics.median(ratios), 4),
        "table_bytes": sum(
            array.nbytes for table in protected.run.tables for array in table.arrays().values()
        ),
    }


def inventory(protected: Protected) -> dict[str, Any]:
    look = protected.checkpointer._saving._saver._parts.inventory.look
    times = [seconds_of(look) for _ in range(50)]
    return {"part": "inventory", "seconds": statistics.median(times), "longest": max(times)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--points", type=int, default=4, help="snapshots at each batch size")
    options = parser.parse_args()
    run = Run(tiny=options.tiny, batch_size=128)
    with tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=options.folder) as folder:
        store = Path(folder) / "store"
        protected = Protected(run, store, priority=cpr_ext.AllRows())
        rows = [read_back(protected), checks(protected, options.points)]
        if not options.tiny:
            run.use_batches_of(2048)
            rows.append(checks(protected, options.points))
        rows.append(inventory(protected))
        protected.close()
    show(rows)
    if not options.tiny:
        keep("check_costs", rows)


if __name__ == "__main__":
    main()
