"""Rows in and out of a table: ours against torch, in one run, on the same rows.

    pytest bench/bench_staging.py -o python_files='bench_*.py'      CPR_BENCH_TINY=1 for seconds

The row ids ascend, as a selection's do, and are spread over the whole table. Both sides write into
memory that is there already and use the same number of threads.
"""

import os

import numpy as np
import pytest
import torch

from cpr_ext._native import native

TINY = os.environ.get("CPR_BENCH_TINY") == "1"
NUM_CHOSEN = 5_000 if TINY else 500_000
MAX_ROWS = 40_000 if TINY else 4_000_000
MAX_BYTES = 1 << 30
THREADS = torch.get_num_threads()
ROUNDS = 3 if TINY else 10


@pytest.fixture(scope="module", params=[64, 256, 512], ids=lambda size: f"{size}B")
def rows(request):
    """(table, row_ids, packed) with rows of one size."""
    num_rows = min(MAX_ROWS, MAX_BYTES // request.param)
    table = torch.ones(num_rows, request.param // 4)
    random = np.random.default_rng(0)
    row_ids = torch.from_numpy(np.sort(random.permutation(num_rows)[:NUM_CHOSEN]))
    return table, row_ids, torch.zeros(NUM_CHOSEN, request.param // 4)


@pytest.fixture(scope="module")
def pool():
    return native.ThreadPool(num_threads=THREADS)


def _run(benchmark, rows, group, action):
    benchmark.group = f"{group} {NUM_CHOSEN} rows of {rows[0].shape[1] * 4} bytes"
    benchmark.extra_info["bytes"] = rows[2].nbytes
    benchmark.extra_info["threads"] = THREADS
    benchmark.pedantic(action, rounds=ROUNDS, warmup_rounds=1)


def test_gather_cpr_ext(benchmark, rows, pool):
    table, row_ids, packed = rows
    _run(benchmark, rows, "gather", lambda: native.gather_rows(table, row_ids, packed, pool=pool))
    assert packed.min() == 1


def test_gather_torch_index_select(benchmark, rows):
    """`torch.index_select(out=)`: no allocation, torch's own threads."""
    table, row_ids, packed = rows
    _run(benchmark, rows, "gather", lambda: torch.index_select(table, 0, row_ids, out=packed))


def test_scatter_cpr_ext(benchmark, rows, pool):
    table, row_ids, packed = rows
    _run(benchmark, rows, "scatter", lambda: native.scatter_rows(packed, row_ids, table, pool=pool))


def test_scatter_torch_index_copy(benchmark, rows):
    """`Tensor.index_copy_`, which like ours writes whole rows in place."""
    table, row_ids, packed = rows
    _run(benchmark, rows, "scatter", lambda: table.index_copy_(0, row_ids, packed))
