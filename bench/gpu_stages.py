"""The stages of a snapshot on a GPU, each beside its peer and the limit of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gpu_bounds
import gpu_device
import torch
from bench_tracking import SKEWS, criteo_rows, make_batches
from gpu_table import Other, Sizes, Target, compare

from cpr_ext._native import native
from cpr_ext.saving.slot_size import DEFAULT_SLOT_BYTES

ROW_BYTES = (64, 256, 512)


def count(sizes: Sizes) -> Iterator[Target]:
    """26 tables of Criteo's proportions, a batch in one call."""
    rows = criteo_rows(sizes.counted_rows)
    ones = torch.ones(sizes.batch_size, dtype=torch.int32, device=gpu_device.DEVICE)
    for skew in SKEWS:
        counters = [
            native.DeviceAccessCounter(name=str(i), num_rows=n, device=0)
            for i, n in enumerate(rows)
        ]
        [drawn] = make_batches(rows, sizes.batch_size, skew, num_batches=1)
        batch = [indices.to(gpu_device.DEVICE) for indices in drawn]
        counts, plain = (
            [torch.zeros(n, dtype=torch.int32, device=gpu_device.DEVICE) for n in rows]
            for _ in range(2)
        )
        in_plain, in_batch = gpu_bounds.addresses(plain), gpu_bounds.addresses(batch)

        def peer(counts: Any = counts, batch: Any = batch) -> None:
            for table, indices in zip(counts, batch, strict=True):
                table.index_add_(0, indices, ones)

        def limit(returns: bool, counts: Any = in_plain, batch: Any = in_batch) -> None:
            gpu_bounds.count(counts, batch, sizes.batch_size, returns=returns)

        yield from compare(
            f"count {len(rows)} x {sizes.batch_size:,} lookups, {skew}",
            lambda counters=counters, batch=batch: native.count_lookups(counters, batch),
            Other("index_add_", peer, 1.0),
            Other("plain atomicAdd per lookup", lambda f=limit: f(False), 0.7),
            Other("plain atomicAdd, old value used", lambda f=limit: f(True), 0.7),
            rounds=sizes.rounds,
        )


def select(sizes: Sizes) -> Iterator[Target]:
    """The top 12.5 % of counts: on the device, then until the row ids are on the host."""
    num_rows, k = sizes.counted_rows, sizes.counted_rows // 8
    generator = torch.Generator(gpu_device.DEVICE).manual_seed(0)
    scores = torch.poisson(
        torch.full((num_rows,), 0.5, device=gpu_device.DEVICE), generator=generator
    ).to(torch.int32)
    counter = native.DeviceAccessCounter(name="t", num_rows=num_rows, device=0)
    row_ids = torch.arange(num_rows, device=gpu_device.DEVICE)
    lookups = torch.repeat_interleave(row_ids, scores)
    counter.observe(lookups)
    gpu_device.synchronize()
    del row_ids, lookups
    other = torch.empty_like(scores)
    yield from compare(
        f"select {k:,} of {num_rows:,}",
        lambda: counter.begin_select(0, num_rows, k),
        Other("torch.topk", lambda: torch.topk(scores, k, sorted=False), 3.0),
        # A copy reads and writes: reading alone is half of it.
        Other("one read at copy bandwidth", lambda: other.copy_(scores), 0.5, share=0.5),
        rounds=sizes.rounds,
        num_bytes=scores.nbytes,
    )
    yield from compare(
        "the same, until the row ids are on the host",
        lambda: counter.select(0, num_rows, k),
        Other("torch.topk(...).indices.cpu()", lambda: torch.topk(scores, k)[1].cpu()),
        rounds=sizes.rounds,
        seconds=gpu_device.host_seconds,
    )


def gather(sizes: Sizes) -> Iterator[Target]:
    """Rows into a buffer of the device by kernels alone, and to the host as a capture does it."""
    for row_bytes in ROW_BYTES:
        rows = _Rows(sizes.gathered_rows, row_bytes)
        # Its buffer holds all of it: one kernel.
        stager = _stager(rows.out.nbytes + (64 << 20))
        moved = f"gather {sizes.gathered_rows:,} rows of {row_bytes} bytes"
        ours = _gathering(stager, rows)
        yield from compare(
            moved,
            ours,
            Other("index_select(out=)", rows.select, 1.0),
            Other("simplest kernel", rows.gather_simply, 0.8),
            rounds=min(5, sizes.rounds),
            seconds=gpu_device.kernel_seconds,
            num_bytes=2 * rows.out.nbytes,
        )
        yield from compare(
            f"{moved} to the host",
            _gathering(_stager(DEFAULT_SLOT_BYTES), rows),
            Other("index_select(out=), copy to pinned", rows.select_to_host, 1.0),
            rounds=sizes.rounds,
            seconds=gpu_device.host_seconds,
            num_bytes=rows.out.nbytes,
        )


def copy_out(sizes: Sizes) -> Iterator[Target]:
    """Rows to the host through the slots that a Checkpointer has, against the copy alone."""
    rows = _Rows(sizes.copied_bytes // 512, 512)
    yield from compare(
        f"copy out {rows.out.nbytes / 1e6:.0f} MB, gathered in slots",
        _gathering(_stager(DEFAULT_SLOT_BYTES), rows),
        Other(
            "pinned cudaMemcpyAsync", lambda: rows.out.copy_(rows.packed, non_blocking=True), 0.95
        ),
        rounds=sizes.rounds,
        seconds=gpu_device.host_seconds,
        num_bytes=rows.out.nbytes,
    )


class _Rows:
    """Random rows, ascending, of a table on the device, and where they go."""

    def __init__(self, count: int, row_bytes: int) -> None:
        shape, dtype = (count, row_bytes // 4), torch.float32
        self.table = torch.randn(8 * count, row_bytes // 4, device=gpu_device.DEVICE)
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randperm(8 * count, generator=generator)[:count].sort().values
        self.row_ids = gpu_device.pinned(count, dtype=torch.int64).copy_(chosen)
        self.on_device = chosen.to(gpu_device.DEVICE)
        self.packed = torch.empty(shape, dtype=dtype, device=gpu_device.DEVICE)
        self.out = gpu_device.pinned(*shape, dtype=dtype)

    def select(self) -> None:
        torch.index_select(self.table, 0, self.on_device, out=self.packed)

    def select_to_host(self) -> None:
        """With what ours does too: the row ids come from the host."""
        self.on_device.copy_(self.row_ids, non_blocking=True)
        self.select()
        self.out.copy_(self.packed, non_blocking=True)

    def gather_simply(self) -> None:
        gpu_bounds.gather(self.table, self.on_device, self.packed)


def _stager(slot_bytes: int) -> Any:
    return native.DeviceStager(device=0, slot_bytes=slot_bytes, num_slots=3)


def _gathering(stager: Any, rows: _Rows) -> gpu_device.Work:
    return lambda: native.gather_rows(rows.table, rows.row_ids, rows.out, stager=stager)
