import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext import _C
from cpr_ext.errors import UsageError
from python_tests.examples import examples

POOLS = [None] + [_C.ThreadPool(num_threads=threads) for threads in (1, 2, 4)]
DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
]
TASK_BYTES, BLOCK_BYTES = 1 << 20, 4096


def reference(rows):
    """Rows (n,) in which any bit is set, by numpy."""
    data = rows.contiguous().view(torch.uint8).reshape(rows.shape[0], -1).numpy()
    return data.any(axis=1).nonzero()[0]


def set_rows(rows, row_ids, value=1):
    for row in row_ids:
        rows[row, (row * 7) % rows.shape[1]] = value
    return rows


@examples(300)
@given(
    dtype=st.sampled_from(DTYPES),
    num_rows=st.integers(1, 300),
    dim=st.integers(1, 40),
    data=st.data(),
)
def test_the_rows_are_those_that_numpy_finds(dtype, num_rows, dim, data):
    row_ids = data.draw(st.sets(st.integers(0, num_rows - 1), max_size=num_rows))
    rows = set_rows(torch.zeros(num_rows, dim, dtype=dtype), row_ids)
    found = _C.nonzero_rows(rows, data.draw(st.sampled_from(POOLS)))
    assert found.dtype == np.int64
    assert found.tolist() == reference(rows).tolist() == sorted(row_ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool", POOLS)
def test_each_byte_of_a_row_is_looked_at(dtype, pool):
    for dim in (1, 3, 5, 8, 9, 17):
        size = dim * dtype.itemsize
        data = np.zeros((size + 2, size), np.uint8)
        data[np.arange(size) + 1, np.arange(size)] = 0x80
        rows = torch.from_numpy(data).view(dtype)
        assert _C.nonzero_rows(rows, pool).tolist() == list(range(1, size + 1))


@pytest.mark.parametrize("dim", [1, 3, 16, 33, 1025])
@pytest.mark.parametrize("threads", range(len(POOLS)))
def test_rows_at_the_borders_of_blocks_and_tasks_are_found_in_order(dim, threads):
    num_rows = 3 * TASK_BYTES // (4 * dim) + 5
    borders = [num_bytes // (4 * dim) for num_bytes in (BLOCK_BYTES, TASK_BYTES, 2 * TASK_BYTES)]
    row_ids = {0, num_rows - 1, *(b + d for b in borders for d in (-1, 0, 1) if b + d >= 0)}
    rows = set_rows(torch.zeros(num_rows, dim), row_ids)
    assert _C.nonzero_rows(rows, POOLS[threads]).tolist() == sorted(row_ids)


def test_negative_zero_nan_and_the_smallest_number_are_not_zero():
    rows = torch.zeros(5, 3)
    rows[1, 2], rows[2, 0], rows[3, 1] = -0.0, float("nan"), 1e-45
    assert _C.nonzero_rows(rows).tolist() == [1, 2, 3]


def test_all_rows_no_rows_and_no_columns():
    assert _C.nonzero_rows(torch.ones(7, 2)).tolist() == list(range(7))
    assert _C.nonzero_rows(torch.zeros(7, 2)).tolist() == []
    assert _C.nonzero_rows(torch.zeros(0, 2)).tolist() == []
    assert _C.nonzero_rows(np.eye(4, dtype=np.float32)).tolist() == [0, 1, 2, 3]


def test_rows_that_are_not_contiguous_or_not_a_matrix_are_refused():
    for wrong in (torch.zeros(4, 6).T, torch.zeros(4), torch.zeros(2, 2, 2)):
        with pytest.raises(UsageError):
            _C.nonzero_rows(wrong)
