"""What counting lookups costs a training step, with nothing being saved.

    python bench/tracking_overhead.py [--pairs 40] [--tiny]

One DLRM (`kaggle`) in one process: short blocks of steps under a Checkpointer that saves nothing
and blocks with its hooks on the tables taken off take turns, each pair in the other order than the
last. The ratio of a pair is that of its median steps. Keeps bench/results/tracking_overhead.json.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from paired import spread
from results import keep, parser_of
from training import Protected, Run, seconds_of

HERE = Path(__file__).resolve().parent
#: Batch size and the steps of a block: a block takes about a quarter of a second.
BLOCKS = {128: 40, 2048: 6}


def block(protected: Protected, steps: int, *, tracking: bool) -> float:
    """The median step's seconds."""
    if tracking:
        protected.watch()
    else:
        protected.let_go()
    step = protected.train_step if tracking else protected.run.train_step
    return statistics.median(seconds_of(step) for _ in range(steps))


def measure(run: Run, protected: Protected, batch_size: int, pairs: int) -> dict[str, Any]:
    run.use_batches_of(batch_size)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(pairs):
        for tracking in (True, False) if number % 2 else (False, True):
            times[tracking].append(block(protected, BLOCKS[batch_size], tracking=tracking))
    ratios = [on / off for on, off in zip(times[True], times[False], strict=True)]
    return {
        "batch_size": batch_size,
        "pairs": pairs,
        "steps_of_a_block": BLOCKS[batch_size],
        "step_seconds_with": statistics.median(times[True]),
        "step_seconds_without": statistics.median(times[False]),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_iqr": round(spread(ratios), 4),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--pairs", type=int, default=40, help="pairs of blocks, for each batch size"
    )
    options = parser.parse_args()
    run = Run(tiny=options.tiny, batch_size=128)
    with tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=options.folder) as folder:
        protected = Protected(run, Path(folder) / "store")
        protected.train_until_saved()  # the base; nothing more is asked for
        rows = [measure(run, protected, size, options.pairs) for size in BLOCKS]
        protected.close()
    for row in rows:
        print(
            f"batch {row['batch_size']:<6}{1e3 * row['step_seconds_with']:8.3f} ms with tracking, "
            f"{1e3 * row['step_seconds_without']:8.3f} ms without: {row['ratio']:.4f} "
            f"(middle half of {row['pairs']} pairs: {row['ratio_iqr']:.4f} wide)"
        )
    if not options.tiny:
        keep("tracking_overhead", rows)


if __name__ == "__main__":
    main()
