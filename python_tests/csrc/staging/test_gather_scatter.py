"""csrc/staging/row_copy.h: whole rows out of a table and back."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import RowIndexError, UsageError

pytestmark = pytest.mark.usefixtures("every_instruction_set")

POOLS = {threads: native.ThreadPool(num_threads=threads) for threads in (1, 2, 3, 4)}
DTYPES = [np.uint8, np.bool_, np.float16, np.float32, np.int64, np.float64, np.complex64]

threads = st.sampled_from([None, 1, 2, 3, 4])
# All sizes that have a copy of their own, their neighbours, and anything up to a page.
row_sizes = st.one_of(
    st.sampled_from([1, 2, 3, 4, 7, 8, 9, 16, 31, 32, 63, 64, 65, 128, 256, 512, 4096]),
    st.integers(1, 4096),
)


def _pool(num_threads):
    return None if num_threads is None else POOLS[num_threads]


def _table(num_rows: int, row_bytes: int, gap: int, seed: int) -> np.ndarray:
    """(num_rows, row_bytes) uint8 whose rows lie `gap` bytes apart in memory.

    With an even seed the first begins at a cache line, as torch's do, else 16 bytes behind one.
    """
    shape = (num_rows, row_bytes + gap)
    shift = 16 * (seed % 2)
    memory = torch.empty(max(1, shape[0]) * shape[1] + shift, dtype=torch.uint8).numpy()
    assert memory.ctypes.data % 64 == 0
    base = memory[shift:][: shape[0] * shape[1]].reshape(shape)
    base[:] = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return base[:, :row_bytes]


@given(
    st.integers(1, 400),
    row_sizes,
    st.sampled_from([0, 0, 1, 5, 64]),
    st.integers(0, 700),
    threads,
    st.integers(0, 2**32),
)
def test_gather_is_numpy_indexing(num_rows, row_bytes, gap, count, num_threads, seed):
    table = _table(num_rows, row_bytes, gap, seed)
    row_ids = np.random.default_rng(seed + 1).integers(0, num_rows, count)
    out = np.zeros((count, row_bytes), np.uint8)
    native.gather_rows(table, row_ids, out, pool=_pool(num_threads))
    np.testing.assert_array_equal(out, table[row_ids])


@given(
    st.integers(1, 400),
    row_sizes,
    st.sampled_from([0, 0, 1, 5, 64]),
    st.floats(0, 1),
    threads,
    st.integers(0, 2**32),
)
def test_scatter_is_numpy_assignment_and_touches_no_other_byte(
    num_rows, row_bytes, gap, share, num_threads, seed
):
    table = _table(num_rows, row_bytes, gap, seed)
    whole = np.lib.stride_tricks.as_strided(table, (num_rows, row_bytes + gap))
    expected = whole.copy()
    row_ids = np.flatnonzero(np.random.default_rng(seed + 2).random(num_rows) < share)
    packed = _table(len(row_ids), row_bytes, 0, seed + 3)
    expected[row_ids, :row_bytes] = packed
    native.scatter_rows(packed, row_ids, table, pool=_pool(num_threads))
    np.testing.assert_array_equal(whole, expected)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
@pytest.mark.parametrize("row_bytes", [4, 64, 100, 4096])
def test_inputs_of_many_tasks_are_cut_without_loss(row_bytes, num_threads):
    count = 4_000_000 // row_bytes
    table = _table(count, row_bytes, 0, 0)
    row_ids = np.random.default_rng(1).permutation(count)
    out = np.zeros_like(table)
    native.gather_rows(table, row_ids, out, pool=POOLS[num_threads])
    np.testing.assert_array_equal(out, table[row_ids])
    ascending = np.flatnonzero(np.random.default_rng(2).random(count) < 0.9)
    back = np.zeros_like(table)
    native.scatter_rows(
        np.ascontiguousarray(table[ascending]), ascending, back, pool=POOLS[num_threads]
    )
    expected = np.zeros_like(table)
    expected[ascending] = table[ascending]
    np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(30,), (30, 3), (30, 2, 5), (30, 1, 4, 1)])
def test_rows_of_any_dtype_and_shape_come_back_as_they_were(dtype, shape):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(0).integers(0, 2, size, np.uint8)
    table = raw.view(dtype).reshape(shape)
    row_ids = np.array([0, 3, 4, 29])
    packed = np.zeros((4, *shape[1:]), dtype)
    native.gather_rows(table, row_ids, packed)
    assert packed.tobytes() == table[row_ids].tobytes()
    back = np.zeros(shape, dtype)
    native.scatter_rows(packed, row_ids, back)
    assert back[row_ids].tobytes() == packed.tobytes()


@pytest.mark.parametrize("bad", [-1, 10, 2**62, -(2**63)])
@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_row_outside_the_table_is_refused_and_nothing_is_written(bad, place):
    table = np.arange(20.0).reshape(10, 2)
    row_ids = np.array([0, 2, 4, 6, 8])
    row_ids[place] = bad
    out = np.zeros((5, 2))
    with pytest.raises(RowIndexError, match=rf"row_ids\[{place}\] is {bad}"):
        native.gather_rows(table, row_ids, out)
    with pytest.raises(RowIndexError):
        native.scatter_rows(out, row_ids, table)
    assert not out.any()
    assert table[2, 0] == 4.0


@pytest.mark.parametrize("row_ids", [[3, 2], [2, 2], [0, 5, 4]])
def test_scatter_refuses_ids_that_do_not_ascend_since_threads_could_share_a_row(row_ids):
    table = np.zeros((10, 2))
    with pytest.raises(UsageError, match="ascend"):
        native.scatter_rows(np.ones((len(row_ids), 2)), np.array(row_ids), table)
    assert not table.any()


def test_a_packed_buffer_of_the_wrong_size_or_with_gaps_is_refused():
    table, row_ids = np.zeros((10, 4), np.float32), np.arange(3)
    for packed in (np.zeros((3, 5), np.float32), np.zeros((2, 4), np.float32)):
        with pytest.raises(UsageError, match="packed has"):
            native.gather_rows(table, row_ids, packed)
    with pytest.raises(UsageError, match="contiguous rows"):
        native.gather_rows(table, row_ids, np.zeros((3, 8), np.float32)[:, ::2])


def test_a_packed_buffer_inside_the_table_is_refused():
    table = np.zeros((10, 4))
    with pytest.raises(UsageError, match="shares memory"):
        native.gather_rows(table, np.arange(5, 10), table[:5])
    with pytest.raises(UsageError, match="shares memory"):
        native.scatter_rows(table[9:], np.array([0]), table)


def test_read_only_memory_is_never_written():
    table, rows = np.zeros((10, 4)), np.ones((2, 4))
    for array in (table, rows):
        array.flags.writeable = False
    with pytest.raises(UsageError, match="out is read-only"):
        native.gather_rows(table, np.arange(2), rows)
    with pytest.raises(UsageError, match="table is read-only"):
        native.scatter_rows(rows, np.arange(2), table)
