"""Following which rows changed: ours beside TorchRec's ModelDeltaTracker, on the same batches.

The tracker keeps every batch's row ids and makes them unique when it is asked, so beside the cost
of a batch stands that of an interval: many batches, then the rows of its delta. Needs `torchrec`.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from bench_tracking import TRACKERS, criteo_rows, in_turn, make_batches
from paired import Comparison, Contender, Settings
from savers import join_group_of_one

from cpr_ext._native import native

BATCHES_OF_AN_INTERVAL = 100
DIM = 16
FRACTION = 0.125


def comparisons(settings: Settings) -> Iterator[Comparison]:
    if importlib.util.find_spec("torchrec") is None:
        print("\nTorchRec's ModelDeltaTracker: torchrec is not installed, so it is left out")
        return
    batch_size = 64 if settings.tiny else 2048
    table_rows = criteo_rows(40_000 if settings.tiny else 4_000_000)
    batches = make_batches(table_rows, batch_size, "zipf")
    ours, theirs = Ours(table_rows), DeltaTracker(table_rows)
    jagged = [theirs.jagged(batch) for batch in batches]
    work = f"{len(table_rows)} x {batch_size} lookups"
    yield Comparison(
        f"note {work}",
        [
            Contender("count_lookups", in_turn(batches, ours.note)),
            Contender(
                "ModelDeltaTracker.record_lookup",
                in_turn(jagged, theirs.note),
                "peer",
                prepare=theirs.clear,  # or it would keep every batch of the benchmark
            ),
        ],
        rounds=40,
    )
    theirs.clear()
    times = 1 if settings.tiny else BATCHES_OF_AN_INTERVAL // len(batches)
    yield Comparison(
        f"note {times * len(batches)} x {work}, then ask for the rows to save",
        [
            Contender("count_lookups, select, take", lambda: ours.interval(batches, times)),
            Contender(
                "ModelDeltaTracker.get_unique_ids", lambda: theirs.interval(jagged, times), "peer"
            ),
        ],
        rounds=7,
    )


class Ours:
    """The 12.5 % most used rows of each table."""

    def __init__(self, table_rows: Sequence[int]) -> None:
        make = TRACKERS["AccessCounter"]
        self._table_rows = table_rows
        self._trackers = [make(f"table_{i}", rows) for i, rows in enumerate(table_rows)]
        self._pool = native.ThreadPool(num_threads=torch.get_num_threads())

    def note(self, batch: Sequence[torch.Tensor]) -> None:
        native.count_lookups(self._trackers, batch, self._pool)

    def interval(self, batches: Sequence[Sequence[torch.Tensor]], times: int) -> None:
        for _ in range(times):
            for batch in batches:
                self.note(batch)
        for rows, tracker in zip(self._table_rows, self._trackers, strict=True):
            k = max(1, int(FRACTION * rows))
            tracker.take(tracker.select(0, rows, k, pool=self._pool), pool=self._pool)


@contextmanager
def quietly() -> Iterator[None]:
    """Without what TorchRec's planner says of every table."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


class DeltaTracker:
    """All rows that were looked up, by TorchRec's tracker of a sharded model of one process."""

    def __init__(self, table_rows: Sequence[int]) -> None:
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        join_group_of_one()
        tables = [
            EmbeddingBagConfig(
                num_embeddings=rows,
                embedding_dim=DIM,
                name=f"table_{i}",
                feature_names=[f"feature_{i}"],
            )
            for i, rows in enumerate(table_rows)
        ]
        self._features = [f"feature_{i}" for i in range(len(tables))]
        collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
        with quietly():
            model = DistributedModelParallel(collection, device=torch.device("cpu"))
        self._tracker = ModelDeltaTrackerTrec(model)

    def jagged(self, batch: Sequence[torch.Tensor]) -> Any:
        """The batch in TorchRec's form, one lookup per sample and table."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        lengths = torch.ones(len(batch) * len(batch[0]), dtype=torch.int64)
        return KeyedJaggedTensor(self._features, torch.cat(list(batch)), lengths=lengths)

    def note(self, batch: Any) -> None:
        """What the lookup of a sharded module calls in a training step."""
        self._tracker.record_lookup(batch, states=torch.empty(0))
        self._tracker.step()

    def clear(self) -> None:
        self._tracker.clear()

    def interval(self, batches: Sequence[Any], times: int) -> None:
        for _ in range(times):
            for batch in batches:
                self.note(batch)
        self._tracker.get_unique_ids()
