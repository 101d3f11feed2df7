"""Counting a batch: 26 tables x 2048 lookups into 4 M rows in all, against torch's index_add_."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import bounds
import numpy as np
import torch
from paired import Comparison, Contender, Settings

from cpr_ext._native import native
from cpr_ext.wings.lab.dlrm.presets import CRITEO_KAGGLE_NUM_EMBEDDINGS

NUM_BATCHES = 16  # in turn, so that nobody finds the same rows in cache each time
SKEWS = ("uniform", "zipf")
TRACKERS: dict[str, Callable[[str, int], Any]] = {
    "AccessCounter": lambda name, rows: native.AccessCounter(name=name, num_rows=rows),
    "DirtyRows": lambda name, rows: native.DirtyRows(name=name, num_rows=rows),
    "RowSampler": lambda name, rows: native.RowSampler(
        name=name, num_rows=rows, capacity=max(1, rows // 8), period=2, seed=0
    ),
}


def criteo_rows(num_rows: int) -> list[int]:
    """Sizes of Criteo's categorical features, scaled to ``num_rows`` in all."""
    total = sum(CRITEO_KAGGLE_NUM_EMBEDDINGS)
    return [max(3, rows * num_rows // total) for rows in CRITEO_KAGGLE_NUM_EMBEDDINGS]


def make_batches(
    table_rows: Sequence[int], batch_size: int, skew: str, num_batches: int = NUM_BATCHES
) -> list[list[torch.Tensor]]:
    random = np.random.default_rng(0)
    draw = {
        "uniform": lambda rows: random.integers(0, rows, batch_size),
        "zipf": lambda rows: (random.zipf(1.2, batch_size) - 1) % rows,
    }[skew]
    return [[torch.from_numpy(draw(rows)) for rows in table_rows] for _ in range(num_batches)]


def in_turn(batches: Sequence[Any], count: Callable[[Any], object]) -> Callable[[], None]:
    """A call without arguments that counts the next batch."""
    turn = 0

    def step() -> None:
        nonlocal turn
        count(batches[turn % len(batches)])
        turn += 1

    return step


def table_by_table(
    count: Callable[[Any, Any], object], counts: Sequence[Any]
) -> Callable[[Any], None]:
    """Count a batch with a call for each table."""

    def run(batch: Any) -> None:
        for table, indices in zip(counts, batch, strict=True):
            count(table, indices)

    return run


def comparisons(settings: Settings) -> Iterator[Comparison]:
    batch_size = 64 if settings.tiny else 2048
    table_rows = criteo_rows(40_000 if settings.tiny else 4_000_000)
    for skew in SKEWS:
        batches = make_batches(table_rows, batch_size, skew)
        yield Comparison(
            f"count {len(table_rows)} x {batch_size} lookups, {skew}",
            [*_ours(skew, table_rows, batches), *_others(table_rows, batch_size, batches)],
            rounds=40,
            facts={"skew": skew},
        )


def _ours(
    skew: str, table_rows: Sequence[int], batches: list[list[torch.Tensor]]
) -> Iterator[Contender]:
    def counting(kind: str, pool: Any) -> Callable[[Any], object]:
        trackers = [TRACKERS[kind](f"table_{i}", rows) for i, rows in enumerate(table_rows)]
        return lambda batch: native.count_lookups(trackers, batch, pool)

    for threads in (1, 2):
        pool = native.ThreadPool(num_threads=threads)
        for kind in TRACKERS:
            count = in_turn(batches, counting(kind, pool))
            yield Contender(
                f"count_lookups[{skew}-{threads}-{kind}]",
                count,
                facts={"tracker": kind, "threads": threads},
            )
    # What crossing from Python costs by itself.
    empty = [[indices[:0] for indices in batch] for batch in batches]
    nothing = in_turn(empty, counting("AccessCounter", None))
    yield Contender(f"count_lookups_of_nothing[{skew}]", nothing, "bound")


def _others(
    table_rows: Sequence[int], batch_size: int, batches: list[list[torch.Tensor]]
) -> Iterator[Contender]:
    def zeros() -> list[torch.Tensor]:
        return [torch.zeros(rows, dtype=torch.int32) for rows in table_rows]

    ones = torch.ones(batch_size, dtype=torch.int32)
    index_add = table_by_table(lambda table, ids: table.index_add_(0, ids, ones), zeros())
    yield Contender("index_add", in_turn(batches, index_add), "peer")
    arrays = [[indices.numpy() for indices in batch] for batch in batches]
    counts = [np.zeros(rows, dtype=np.uint32) for rows in table_rows]
    add_at = table_by_table(lambda table, ids: np.add.at(table, ids, 1), counts)
    yield Contender("numpy_add_at", in_turn(arrays, add_at), "peer")
    plain = zeros()
    where = bounds.addresses(plain)
    loop = in_turn(
        [(bounds.addresses(batch), plain) for batch in batches],
        lambda batch: bounds.count(where, batch[0], batch_size),
    )
    yield Contender("prefetching loop, unchecked", loop, "bound")
