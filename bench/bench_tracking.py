"""Counting a batch: 26 tables x 2048 lookups into 4 M rows in all, against torch's index_add_.

pytest bench -o python_files='bench_*.py'      (CPR_BENCH_TINY=1: only that it runs)
"""

import os

import numpy as np
import pytest
import torch

from cpr_ext import _C

TINY = os.environ.get("CPR_BENCH_TINY") == "1"
BATCH_SIZE = 64 if TINY else 2048
NUM_ROWS = 40_000 if TINY else 4_000_000
NUM_BATCHES = 16  # in turn, so that no peer finds the same rows in cache each time

# Sizes of Criteo's categorical features, to be scaled to NUM_ROWS.
CRITEO_ROWS = [
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
]
TABLE_ROWS = [max(3, rows * NUM_ROWS // sum(CRITEO_ROWS)) for rows in CRITEO_ROWS]


def make_batches(skew):
    random = np.random.default_rng(0)
    draw = {
        "uniform": lambda rows: random.integers(0, rows, BATCH_SIZE),
        "zipf": lambda rows: (random.zipf(1.2, BATCH_SIZE) - 1) % rows,
    }[skew]
    return [[torch.from_numpy(draw(rows)) for rows in TABLE_ROWS] for _ in range(NUM_BATCHES)]


def make_trackers(kind):
    make = {
        "AccessCounter": lambda name, rows: _C.AccessCounter(name=name, num_rows=rows),
        "DirtyRows": lambda name, rows: _C.DirtyRows(name=name, num_rows=rows),
        "RowSampler": lambda name, rows: _C.RowSampler(
            name=name, num_rows=rows, capacity=max(1, rows // 8), period=2, seed=0
        ),
    }[kind]
    return [make(f"table_{i}", rows) for i, rows in enumerate(TABLE_ROWS)]


def in_turn(batches, count):
    """A call without arguments that counts the next batch."""
    turn = 0

    def step():
        nonlocal turn
        count(batches[turn % len(batches)])
        turn += 1

    return step


@pytest.fixture(params=["uniform", "zipf"])
def batches(request, benchmark):
    benchmark.group = f"count {len(TABLE_ROWS)} x {BATCH_SIZE} lookups, {request.param}"
    return make_batches(request.param)


@pytest.mark.parametrize("kind", ["AccessCounter", "DirtyRows", "RowSampler"])
@pytest.mark.parametrize("threads", [1, 2])
def test_count_lookups(benchmark, batches, kind, threads):
    trackers = make_trackers(kind)
    pool = _C.ThreadPool(num_threads=threads)
    benchmark(in_turn(batches, lambda batch: _C.count_lookups(trackers, batch, pool)))


def test_count_lookups_of_nothing(benchmark, batches):
    """What crossing from Python costs by itself."""
    trackers = make_trackers("AccessCounter")
    empty = [[indices[:0] for indices in batch] for batch in batches]
    benchmark(in_turn(empty, lambda batch: _C.count_lookups(trackers, batch)))


def test_peer_index_add(benchmark, batches):
    counts = [torch.zeros(rows, dtype=torch.int32) for rows in TABLE_ROWS]
    ones = torch.ones(BATCH_SIZE, dtype=torch.int32)

    def count(batch):
        for table, indices in zip(counts, batch, strict=True):
            table.index_add_(0, indices, ones)

    benchmark(in_turn(batches, count))


def test_peer_numpy_add_at(benchmark, batches):
    counts = [np.zeros(rows, dtype=np.uint32) for rows in TABLE_ROWS]
    arrays = [[indices.numpy() for indices in batch] for batch in batches]

    def count(batch):
        for table, indices in zip(counts, batch, strict=True):
            np.add.at(table, indices, 1)

    benchmark(in_turn(arrays, count))
