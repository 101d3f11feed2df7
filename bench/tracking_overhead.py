"""What counting lookups costs a training step, with nothing being saved.

    python bench/tracking_overhead.py [--pairs 40] [--tiny]

One DLRM (`kaggle`) in one process: short blocks of steps take turns, each round in another order,
under a Checkpointer that saves nothing, without hooks on the tables, and with the simplest counting
there can be: a hook that keeps the indices, and one loop in C without checks. The ratio of a round
is that of its median steps. Keeps bench/results/tracking_overhead.json.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bounds
import torch
from paired import spread
from results import keep, parser_of
from training import Protected, Run, seconds_of

HERE = Path(__file__).resolve().parent
#: Batch size and the steps of a block: a block takes about a quarter of a second.
BLOCKS = {128: 40, 2048: 6}


@contextmanager
def tracked(protected: Protected) -> Iterator[Callable[[], None]]:
    """A step under the Checkpointer."""
    protected.watch()
    yield protected.train_step
    protected.let_go()


@contextmanager
def untracked(run: Run) -> Iterator[Callable[[], None]]:
    """A step without hooks."""
    yield run.train_step


@contextmanager
def counted_simply(run: Run, counts: dict[int, torch.Tensor]) -> Iterator[Callable[[], None]]:
    """A step whose lookups a hook keeps, and one loop counts."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(module: Any, args: tuple[Any, ...]) -> None:
        seen.append((counts[id(module)], args[0]))

    def step() -> None:
        run.train_step()
        tables, indices = zip(*seen, strict=True)
        seen.clear()
        bounds.count(bounds.addresses(tables), bounds.addresses(indices), indices[0].numel())

    modules = [module for table in run.tables for module in table.modules]
    handles = [module.register_forward_pre_hook(note) for module in modules]
    yield step
    for handle in handles:
        handle.remove()


def block(step: Callable[[], None], steps: int) -> float:
    """The median step's seconds."""
    return statistics.median(seconds_of(step) for _ in range(steps))


def measure(
    run: Run, protected: Protected, batch_size: int, steps: int, pairs: int
) -> dict[str, Any]:
    run.use_batches_of(batch_size)
    counts = {
        id(module): torch.zeros(table.num_embeddings, dtype=torch.int32)
        for table in run.tables
        for module in table.modules
    }
    ways: dict[str, Callable[[], Any]] = {
        "tracked": lambda: tracked(protected),
        "untracked": lambda: untracked(run),
        "simple": lambda: counted_simply(run, counts),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    chance = random.Random(batch_size)
    for _ in range(pairs):
        for name in chance.sample(list(ways), len(ways)):
            with ways[name]() as step:
                times[name].append(block(step, steps))
    ratios, simple = (
        [one / without for one, without in zip(times[name], times["untracked"], strict=True)]
        for name in ("tracked", "simple")
    )
    return {
        "batch_size": batch_size,
        "pairs": pairs,
        "steps_of_a_block": steps,
        "step_seconds_with": statistics.median(times["tracked"]),
        "step_seconds_without": statistics.median(times["untracked"]),
        "step_seconds_counted_simply": statistics.median(times["simple"]),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_iqr": round(spread(ratios), 4),
        "simple_ratio": round(statistics.median(simple), 4),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--pairs", type=int, default=40, help="pairs of blocks, for each batch size"
    )
    options = parser.parse_args()
    blocks = dict.fromkeys(BLOCKS, 2) if options.tiny else BLOCKS
    run = Run(tiny=options.tiny, batch_size=128)
    with tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=options.folder) as folder:
        protected = Protected(run, Path(folder) / "store")
        protected.train_until_saved()  # the base; nothing more is asked for
        protected.let_go()
        rows = [
            measure(run, protected, size, steps, options.pairs) for size, steps in blocks.items()
        ]
        protected.close()
    for row in rows:
        print(
            f"batch {row['batch_size']:<6}{1e3 * row['step_seconds_with']:8.3f} ms with tracking, "
            f"{1e3 * row['step_seconds_without']:8.3f} ms without: {row['ratio']:.4f}, "
            f"counted simply {row['simple_ratio']:.4f} "
            f"(middle half of {row['pairs']} pairs: {row['ratio_iqr']:.4f} wide)"
        )
    if not options.tiny:
        keep("tracking_overhead", rows)


if __name__ == "__main__":
    main()
