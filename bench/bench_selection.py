"""The top 12.5 % of 4 M scores, against numpy's argpartition and torch's topk.

    pytest bench -o python_files='bench_*.py'      (CPR_BENCH_TINY=1: only that it runs)

The peers return the rows in no order and count zeros in; only top_rows sorts them by row id.
"""

import os

import numpy as np
import pytest
import torch

from cpr_ext import _C

TINY = os.environ.get("CPR_BENCH_TINY") == "1"
NUM_ROWS = 10_000 if TINY else 4_000_000
K = NUM_ROWS // 8

random = np.random.default_rng(0)
SCORES = {
    "zipf_counts": lambda: np.bincount(
        (random.zipf(1.1, 2 * NUM_ROWS) - 1) % NUM_ROWS, minlength=NUM_ROWS
    ).astype(np.uint32),
    "poisson_counts": lambda: random.poisson(1.5, NUM_ROWS).astype(np.uint32),
    "large_counts": lambda: random.integers(0, 2**31, NUM_ROWS).astype(np.uint32),
    "changes": lambda: np.abs(random.standard_normal(NUM_ROWS)).astype(np.float32),
}


@pytest.fixture(params=SCORES, scope="module")
def named_scores(request):
    return request.param, SCORES[request.param]()


@pytest.fixture
def scores(named_scores, benchmark):
    name, scores = named_scores
    benchmark.group = f"top {K} of {NUM_ROWS} {name}"
    return scores


@pytest.mark.parametrize("threads", [1, 2])
def test_top_rows(benchmark, scores, threads):
    pool = _C.ThreadPool(num_threads=threads)
    benchmark(_C.top_rows, scores, K, pool)


def test_peer_argpartition(benchmark, scores):
    benchmark(lambda: np.argpartition(scores, NUM_ROWS - K)[NUM_ROWS - K :])


def test_peer_topk(benchmark, scores):
    signed = torch.from_numpy(scores if scores.dtype == np.float32 else scores.astype(np.int32))
    benchmark(torch.topk, signed, K, sorted=False)
