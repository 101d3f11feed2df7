"""Rows in and out of a table: ours against torch and a hand-written loop, on the same rows.

The chosen rows are spread over the whole table, in ascending order, as a selection's are, or in
random order. All write into memory that is there already and use the same number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import bounds
import numpy as np
import torch
from paired import Comparison, Contender, Settings

from cpr_ext._native import native

MAX_BYTES = 1 << 30
ROW_BYTES = (64, 256, 512)
ORDERS = ("ascending", "random")


def make_rows(
    num_rows: int, row_bytes: int, num_chosen: int, order: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(table, row_ids, packed): the row ids are different, the table is all ones."""
    chosen = np.random.default_rng(0).permutation(num_rows)[:num_chosen]
    if order == "ascending":
        chosen.sort()
    dim = row_bytes // 4
    return torch.ones(num_rows, dim), torch.from_numpy(chosen), torch.zeros(num_chosen, dim)


def comparisons(settings: Settings) -> Iterator[Comparison]:
    num_chosen = 5_000 if settings.tiny else 500_000
    for row_bytes in ROW_BYTES:
        num_rows = min(8 * num_chosen, MAX_BYTES // row_bytes)
        for order in ORDERS:
            rows = make_rows(num_rows, row_bytes, num_chosen, order)
            suffix = "" if order == "ascending" else f", {order} order"
            work = f"{num_chosen} rows of {row_bytes} bytes{suffix}"
            facts = {"row_bytes": row_bytes, "order": order, "bytes": rows[2].nbytes}
            yield Comparison(f"gather {work}", _gather(*rows), 12, facts)
            if order == "ascending":  # scatter_rows takes no other: so no two threads meet
                yield Comparison(f"scatter {work}", _scatter(*rows), 12, facts)


def _gather(table: torch.Tensor, row_ids: torch.Tensor, packed: torch.Tensor) -> list[Contender]:
    threads = torch.get_num_threads()
    pool = native.ThreadPool(num_threads=threads)
    return [
        Contender("gather_cpr_ext", lambda: native.gather_rows(table, row_ids, packed, pool=pool)),
        Contender(
            "index_select(out=)", lambda: torch.index_select(table, 0, row_ids, out=packed), "peer"
        ),
        Contender(
            "prefetching loop", lambda: bounds.gather(table, row_ids, packed, threads), "bound"
        ),
    ]


def _scatter(table: torch.Tensor, row_ids: torch.Tensor, packed: torch.Tensor) -> list[Contender]:
    threads = torch.get_num_threads()
    pool = native.ThreadPool(num_threads=threads)
    return [
        Contender(
            "scatter_cpr_ext", lambda: native.scatter_rows(packed, row_ids, table, pool=pool)
        ),
        Contender("index_copy_", lambda: table.index_copy_(0, row_ids, packed), "peer"),
        Contender(
            "prefetching loop", lambda: bounds.scatter(packed, row_ids, table, threads), "bound"
        ),
    ]
