"""Rows in and out of a table: ours against torch and a hand-written loop, on the same rows.

The chosen rows are spread over the whole table, in ascending order, as a selection's are, or in
random order. All write into memory that is there already and use the same number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import bounds
import numpy as np
import torch
from memory import aligned_memory
from paired import Comparison, Contender, Settings

from cpr_ext._native import native

MAX_BYTES = 1 << 30
ROW_BYTES = (64, 256, 512)
ORDERS = ("ascending", "random")
SLOT_BYTES = 8 << 20


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
            yield Comparison(f"gather {work}", _gather(*rows), 30, facts)
            if order == "ascending":
                yield Comparison(f"pack and check {work}", _gather_and_check(*rows), 12, facts)
                # scatter_rows takes no other order: so no two threads meet
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
        Contender(
            "streaming loop",
            lambda: bounds.gather(table, row_ids, packed, threads, streams=True),
            "bound",
        ),
    ]


def _gather_and_check(
    table: torch.Tensor, row_ids: torch.Tensor, packed: torch.Tensor
) -> list[Contender]:
    """As a snapshot does it: into a slot, which is read at once for its checksum."""
    threads = torch.get_num_threads()
    pool = native.ThreadPool(num_threads=threads)
    parts = row_ids.split(SLOT_BYTES // packed[0].nbytes)
    slot = aligned_memory(SLOT_BYTES)

    def checked(gather: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[[], object]:
        def run() -> None:
            for part in parts:
                rows = torch.frombuffer(
                    slot, dtype=packed.dtype, count=len(part) * packed.shape[1]
                ).view(len(part), -1)
                gather(part, rows)
                native.crc32c(rows.numpy().view(np.uint8).reshape(-1))

        return run

    def loop(*, streams: bool) -> Callable[[], object]:
        return checked(
            lambda part, rows: bounds.gather(table, part, rows, threads, streams=streams)
        )

    return [
        Contender(
            "gather_cpr_ext",
            checked(lambda part, rows: native.gather_rows(table, part, rows, pool=pool)),
        ),
        Contender("prefetching loop", loop(streams=False), "bound"),
        Contender("streaming loop", loop(streams=True), "bound"),
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
            "streaming loop", lambda: bounds.scatter(packed, row_ids, table, threads), "bound"
        ),
    ]
