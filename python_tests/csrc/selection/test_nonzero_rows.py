"""csrc/selection/nonzero_rows.h: rows in which any bit is set."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext import _C
from cpr_ext.errors import UsageError
from python_tests.examples import examples

POOLS = [None] + [_C.ThreadPool(num_threads=threads) for threads in (1, 4)]
TASK_BYTES, BLOCK_BYTES = 1 << 20, 4096


@examples(300)
@given(
    row_bytes=st.integers(1, 160),
    num_rows=st.integers(0, 300),
    share=st.sampled_from([0, 0.01, 0.5, 1]),
    seed=st.integers(0, 2**32),
)
def test_the_rows_are_those_that_numpy_finds(row_bytes, num_rows, share, seed):
    """Of each a single bit, anywhere in it."""
    random = np.random.default_rng(seed)
    row_ids = np.flatnonzero(random.random(num_rows) < share)
    rows = np.zeros((num_rows, row_bytes), np.uint8)
    rows[row_ids, random.integers(0, row_bytes, len(row_ids))] = 1 << random.integers(0, 8)
    assert _C.nonzero_rows(torch.from_numpy(rows)).tolist() == row_ids.tolist()


@pytest.mark.parametrize("dim", [1, 3, 16, 1025])
@pytest.mark.parametrize("pool", POOLS)
def test_rows_at_the_borders_of_blocks_and_tasks_are_found_in_order(dim, pool):
    num_rows = 3 * TASK_BYTES // (4 * dim) + 5
    borders = [num_bytes // (4 * dim) for num_bytes in (BLOCK_BYTES, TASK_BYTES, 2 * TASK_BYTES)]
    row_ids = {0, num_rows - 1, *(b + d for b in borders for d in (-1, 0, 1) if b + d >= 0)}
    rows = torch.zeros(num_rows, dim)
    for row in row_ids:
        rows[row, (row * 7) % dim] = 1
    assert _C.nonzero_rows(rows, pool).tolist() == sorted(row_ids)


def test_rows_are_read_as_bits_and_what_is_no_matrix_is_refused():
    rows = torch.zeros(5, 3)
    rows[1, 2], rows[2, 0], rows[3, 1] = -0.0, float("nan"), 1e-45
    assert _C.nonzero_rows(rows).tolist() == [1, 2, 3]
    for wrong in (torch.zeros(4, 6).T, torch.zeros(4), torch.zeros(2, 2, 2)):
        with pytest.raises(UsageError):
            _C.nonzero_rows(wrong)
