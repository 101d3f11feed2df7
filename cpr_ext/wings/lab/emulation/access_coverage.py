"""How unevenly training accesses rows, and what share of the updates the top r rows cover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cpr_ext import Table
from cpr_ext.state.table import prioritized_tables
from cpr_ext.wings.lab.dlrm.array_types import Int64
from cpr_ext.wings.lab.dlrm.batch import DataSource

_POINTS = 60
_MAX_LOOKUPS = 1 << 26  # of one table; enough for a curve, and bounded for a long stream


def measure_coverage(
    source: DataSource,
    *,
    batch_size: int,
    max_steps: int,
    save_steps: int,
    fraction: float,
    seed: int,
) -> dict[str, Any]:
    """Count the lookups of the prioritised tables in the first epoch.

    Args:
        max_steps: count at most so many steps.
        save_steps: steps from one save to the next, the window in which an MFU save ranks rows.
        fraction: r, the share of the rows that it saves.

    Returns:
        JSON values: ``tables`` their names and rows; ``row_share`` and ``access_share``, the
        access-skew curve, hottest rows first; ``covered``, the share of all accesses that the top r
        of each table take; ``covered_in_window``, the mean over windows of the share of a window's
        accesses that its own top r take.
    """
    places = _prioritized(source)
    counts = [np.zeros(source.num_embeddings[place], dtype=np.int64) for place in places]
    window = [np.zeros_like(table) for table in counts]
    covered, steps_in_window, lookups = [], 0, 0
    batches = source.train_batches(batch_size, seed=seed)
    for step, batch in enumerate(batches):
        if step >= max_steps or lookups > _MAX_LOOKUPS:
            break
        for position, place in enumerate(places):
            indices = batch.indices[place].numpy()
            np.add.at(window[position], indices, 1)
            lookups += len(indices)
        steps_in_window += 1
        if steps_in_window == save_steps:
            covered.append(_covered(window, fraction))
            steps_in_window = 0
            _move(window, counts)
    _move(window, counts)
    row_share, access_share = _curve(counts)
    return {
        "tables": {source.table_names[place]: source.num_embeddings[place] for place in places},
        "fraction": fraction,
        "row_share": row_share.tolist(),
        "access_share": access_share.tolist(),
        "covered": _covered(counts, fraction),
        "covered_in_window": float(np.mean(covered)) if covered else None,
    }


def _prioritized(source: DataSource) -> list[int]:
    """Return positions of the tables that the library would prioritise, largest first."""
    tables = [
        Table(str(place), torch.empty(rows, 1, device="meta"))
        for place, rows in enumerate(source.num_embeddings)
    ]
    return [int(table.name) for table in prioritized_tables(tables)]


def _move(window: Sequence[Int64], counts: Sequence[Int64]) -> None:
    for fresh, total in zip(window, counts, strict=True):
        total += fresh
        fresh[:] = 0


def _covered(counts: Sequence[Int64], fraction: float) -> float:
    """Return the share of the accesses that the top ``fraction`` of each table's rows take."""
    top = 0
    for table in counts:
        budget = int(np.ceil(fraction * len(table)))
        top += int(np.partition(table, len(table) - budget)[len(table) - budget :].sum())
    return top / max(1, sum(int(table.sum()) for table in counts))


def _curve(
    counts: Sequence[Int64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the share of rows and of accesses, rows of all tables together, hottest first."""
    accesses = np.sort(np.concatenate(counts))[::-1]
    running = np.cumsum(accesses)
    last = len(accesses)
    ranks = np.unique(np.geomspace(1, last, min(_POINTS, last)).astype(np.int64))
    return ranks / last, running[ranks - 1] / max(1, running[-1])
