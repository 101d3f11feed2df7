"""One pytest-benchmark test for each stage of checkpointing. The targets are in docs/benchmarks.md.

An emulated device runs CUDA kernels on the CPU: its times show nothing but that they run.
"""

from __future__ import annotations

import bench_selection
import bench_staging
import bench_storage
import bench_tracking
import numpy as np
import pytest
import torch

from cpr_ext._native import native
from cpr_ext.wings.tools.maintenance.verification import verify

ROW_BYTES = 256


def make_counter(module, device, name, rows):
    if device is None:
        return module.AccessCounter(name=name, num_rows=rows)
    return module.DeviceAccessCounter(name=name, num_rows=rows, device=device)


def finish(name):
    if name == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("skew", bench_tracking.SKEWS)
def test_count(measure, backend, is_tiny, skew):
    name, module, device = backend
    batch_size = 64 if is_tiny else 2048
    sizes = bench_tracking.criteo_rows(40_000 if is_tiny else 4_000_000)
    counters = [make_counter(module, device, f"t{i}", rows) for i, rows in enumerate(sizes)]
    batches = bench_tracking.make_batches(sizes, batch_size, skew)
    if name == "cuda":
        batches = [[indices.cuda() for indices in batch] for batch in batches]

    def count(batch):
        module.count_lookups(counters, batch, None)
        finish(name)

    rows = batch_size * len(sizes)
    measure("count", bench_tracking.in_turn(batches, count), rows=rows, num_bytes=8 * rows)


@pytest.mark.parametrize("scores", bench_selection.COUNTS)
def test_select(measure, backend, is_tiny, scores):
    name, module, device = backend
    rows = 10_000 if is_tiny else 4_000_000
    counts = bench_selection.SCORES[scores](np.random.default_rng(0), rows) % 100
    counter = make_counter(module, device, "t", rows)
    lookups = torch.from_numpy(np.repeat(np.arange(rows), counts.astype(np.int64)))
    counter.observe(lookups.cuda() if name == "cuda" else lookups)
    measure("select", lambda: counter.select(0, rows, rows // 8), rows=rows, num_bytes=4 * rows)


@pytest.fixture
def staged(is_tiny):
    """(table, row ids, packed rows), and a pool."""
    num_chosen = 5_000 if is_tiny else 500_000
    rows = bench_staging.make_rows(8 * num_chosen, ROW_BYTES, num_chosen, "ascending")
    return *rows, native.ThreadPool(num_threads=torch.get_num_threads())


def test_gather(measure, staged):
    table, row_ids, packed, pool = staged

    def gather():
        native.gather_rows(table, row_ids, packed, pool=pool)

    measure("gather", gather, rows=len(row_ids), num_bytes=packed.nbytes)
    assert torch.equal(packed, table[row_ids])


def test_scatter(measure, staged):
    table, row_ids, packed, pool = staged

    def scatter():
        native.scatter_rows(packed, row_ids, table, pool=pool)

    measure("scatter", scatter, rows=len(row_ids), num_bytes=packed.nbytes)
    assert not table[row_ids].any()


@pytest.mark.parametrize("kind", ["best", "portable"])
def test_checksum(measure, is_tiny, kind):
    block = np.random.default_rng(0).integers(
        0, 256, (64 << 10) if is_tiny else (4 << 20), np.uint8
    )
    measure(
        "checksum",
        lambda: native.crc32c(block, backend=kind),
        rows=block.nbytes // ROW_BYTES,
        num_bytes=block.nbytes,
    )


@pytest.fixture
def tables(folder, is_tiny, device):
    """A table with state under a Checkpointer of one shard; see bench_storage.Tables."""
    made = bench_storage.Tables(
        (1 << 20) if is_tiny else 500_000_000, folder / "store", num_shards=1, device=device
    )
    yield made
    made.close()


def rows_of(tables):
    return len(tables.tensors["sum"])


def test_write(measure, tables):
    """A base snapshot into an empty store: all rows, so that the disk decides."""
    measure(
        "write",
        tables.save,
        rows=rows_of(tables),
        num_bytes=tables.total_bytes,
        setup=tables.begin_anew,
    )


def test_read(measure, tables):
    """Every byte of a store is read and checked; nothing is restored."""
    tables.save()
    num_bytes = sum(path.stat().st_size for path in tables.store.rglob("*") if path.is_file())
    measure("read", lambda: verify(tables.store), rows=rows_of(tables), num_bytes=num_bytes)


def test_snapshot(measure, tables):
    """A partial snapshot of an eighth of the rows, from the choice of rows to the commit."""
    tables.save()
    checkpointer = tables.checkpointer
    num_rows = rows_of(tables)
    (tracker,) = checkpointer._trackers.values()
    changed = torch.arange(0, num_rows, 8, device=tables.tensors["sum"].device)

    def snapshot():
        checkpointer.save("partial")
        checkpointer.wait()

    measure(
        "snapshot",
        snapshot,
        rows=len(changed),
        num_bytes=tables.total_bytes // 8,
        setup=lambda: tracker.observe(changed),
    )


def test_recovery(measure, tables):
    """All rows of a base snapshot are read, checked and written into the table."""
    tables.save()
    measure(
        "recovery", lambda: tables.recover([0]), rows=rows_of(tables), num_bytes=tables.total_bytes
    )
