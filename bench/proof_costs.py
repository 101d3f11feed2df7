"""What the three proofs cost training: inventory, round trip, scrub.

    python bench/proof_costs.py [--blocks 60] [--tiny]

One DLRM (`kaggle`: 2.3 GB of tables) at batch 2048, in one process. First a base snapshot is read
back while training runs: the ratio of a step meanwhile to one after it, and the CPU of the reading
thread. Then blocks of steps with and without the scrub take turns; the time inside its slices is
measured, too. Last the inventory is looked up as at a snapshot. Keeps
bench/results/proof_costs.json.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from paired import median_interval
from results import keep, parser_of, show
from training import Protected, Run, seconds_of

STEPS = 6


def median_step(protected: Protected, steps: int) -> float:
    return statistics.median(seconds_of(protected.train_step) for _ in range(steps))


def cpu_of_committer() -> float:
    """Seconds of CPU that the committing thread has used."""
    ids = [each.native_id for each in threading.enumerate() if "commit" in each.name]
    assert len(ids) == 1, threading.enumerate()
    return int(Path(f"/proc/self/task/{ids[0]}/schedstat").read_text().split()[0]) / 1e9


def round_trip(protected: Protected) -> dict[str, Any]:
    """Train while a base snapshot is read back, and after it."""
    saver = protected.checkpointer._saving._saver
    during: list[float] = []
    protected.ask()
    protected.train_until_saved()
    started, cpu = time.perf_counter(), cpu_of_committer()
    while (trip := saver.claims.round_trips._trip) is not None:
        size = trip.bytes_read
        during.append(seconds_of(protected.train_step))
    seconds = time.perf_counter() - started
    cpu = cpu_of_committer() - cpu
    after = [seconds_of(protected.train_step) for _ in range(max(len(during) // 4, 8))]
    assert saver.claims.round_trips.num_done == 1, "the base was not read back"
    assert during, "it was read back before a step"
    with_trip, without = statistics.median(during or after), statistics.median(after)
    return {
        "proof": "round trip",
        "seconds": seconds,
        "bytes": size,
        "step_seconds_during": with_trip,
        "step_seconds_after": without,
        "ratio": round(with_trip / without, 4),
        "cores": round(cpu / seconds, 3),
    }


def scrub(protected: Protected, blocks: int, *, tiny: bool) -> dict[str, Any]:
    """Blocks of steps with the scrub and without it, in turns."""
    found = protected.checkpointer._saving._saver.claims.scrub
    advance, is_due = found.advance, found.is_due
    inside = 0.0

    def timed() -> Any:
        nonlocal inside
        started = time.perf_counter()
        try:
            return advance()
        finally:
            inside += time.perf_counter() - started

    found.advance = timed
    found._pass_seconds = 600.0
    ratios, total = [], 0.0
    for number in range(blocks):
        pair = {}
        for with_it in (True, False) if number % 2 else (False, True):
            found.is_due = is_due if with_it else lambda: False
            started = time.perf_counter()
            pair[with_it] = median_step(protected, 2 if tiny else STEPS)
            total += time.perf_counter() - started if with_it else 0.0
        ratios.append(pair[True] / pair[False])
    found.advance, found.is_due = advance, is_due
    low, high = median_interval(ratios)
    rows = sum(table.num_embeddings for table in protected.run.tables)
    return {
        "proof": "scrub",
        "share_of_time": round(inside / total, 6),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_low": round(low, 4),
        "ratio_high": round(high, 4),
        "blocks": blocks,
        "memory_bytes": 2 * rows,
        "table_bytes": sum(
            array.nbytes for table in protected.run.tables for array in table.arrays().values()
        ),
    }


def inventory(protected: Protected) -> dict[str, Any]:
    look = protected.checkpointer._saving._saver._parts.inventory.look
    times = [seconds_of(look) for _ in range(50)]
    return {"proof": "inventory", "seconds": statistics.median(times), "longest": max(times)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--blocks", type=int, default=60, help="pairs of blocks")
    options = parser.parse_args()
    run = Run(tiny=options.tiny, batch_size=128 if options.tiny else 2048)
    with tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=options.folder) as folder:
        protected = Protected(run, Path(folder) / "store", consistency="step")
        rows = [
            round_trip(protected),
            scrub(protected, options.blocks, tiny=options.tiny),
            inventory(protected),
        ]
        protected.close()
    show(rows)
    if not options.tiny:
        keep("proof_costs", rows)


if __name__ == "__main__":
    main()
