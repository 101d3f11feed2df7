import ctypes
import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext import _C
from python_tests.examples import examples
from python_tests.faults.memory_meter import MemoryMeter

HIGHEST_COUNT = 2**32 - 1


def test_counts_are_those_of_bincount():
    indices = np.random.default_rng(0).integers(0, 50, 5000)
    counter = _C.AccessCounter(name="t", num_rows=60)
    counter.observe(indices)
    assert counter.counts().dtype == np.uint32
    np.testing.assert_array_equal(counter.counts(), np.bincount(indices, minlength=60))


@examples(50)
@given(
    num_rows=st.sampled_from([1, 3, 100, 2047, 2048, 2049, 70_000]),
    num_indices=st.integers(0, 200),
    skew=st.sampled_from([1, 2, 1000]),
    dtype=st.sampled_from([np.int32, np.int64]),
    seed=st.integers(0, 99),
)
def test_any_shape_and_skew_of_lookups_is_counted(num_rows, num_indices, skew, dtype, seed):
    random = np.random.default_rng(seed)
    indices = (random.integers(0, num_rows, num_indices) // skew).astype(dtype)
    counter = _C.AccessCounter(name="t", num_rows=num_rows)
    counter.observe(indices.reshape(1, -1, 1))
    np.testing.assert_array_equal(counter.counts(), np.bincount(indices, minlength=num_rows))
    assert counter.num_dirty() == len(np.unique(indices))


def test_counts_is_a_live_view_that_nobody_can_write():
    counter = _C.AccessCounter(name="t", num_rows=4)
    counts = counter.counts()
    counter.observe(np.array([2, 2]))
    assert counts.tolist() == [0, 0, 2, 0]
    with pytest.raises(ValueError, match="read-only"):
        counts[0] = 1


def test_counts_keeps_its_counter_alive():
    counter = _C.AccessCounter(name="t", num_rows=1000)
    counter.observe(np.arange(1000))
    counts = counter.counts()
    del counter
    gc.collect()
    assert counts.sum() == 1000


def counter_with(row_id, count):
    """Four thousand million lookups would take too long, so the test writes the memory itself."""
    counter = _C.AccessCounter(name="t", num_rows=8)
    counter.observe(np.array([row_id]))  # says where counts are
    address = counter.counts().ctypes.data + 4 * row_id
    ctypes.c_uint32.from_address(address).value = count
    counter.put_back(counter.take_range(0, 8))  # tells the counter how near its limit it is
    return counter


@pytest.mark.parametrize("below", [0, 1, 5])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_count_stops_at_its_limit(below, dtype):
    counter = counter_with(3, HIGHEST_COUNT - below)
    counter.observe(np.full(4, 3, dtype=dtype))
    assert counter.counts().tolist() == [
        0,
        0,
        0,
        min(HIGHEST_COUNT, HIGHEST_COUNT - below + 4),
        *[0] * 4,
    ]


@pytest.mark.parametrize("below", [0, 1, 5])
def test_a_count_put_back_stops_at_the_limit(below):
    counter = counter_with(3, HIGHEST_COUNT - below)
    taken = counter.take_range(0, 8)
    counter.observe(np.array([3, 3, 3]))
    counter.put_back(taken)
    assert counter.counts()[3] == min(HIGHEST_COUNT, HIGHEST_COUNT - below + 3)


def test_the_highest_counts_are_selected_and_ties_go_to_the_lowest_row():
    counter = _C.AccessCounter(name="t", num_rows=10)
    counter.observe(np.array([9, 9, 9, 1, 1, 7, 7, 4, 4, 0]))
    assert counter.select(0, 10, 3).tolist() == [1, 4, 9]
    assert counter.select(2, 9, 2).tolist() == [4, 7]
    assert counter.select(0, 10, 99).tolist() == [0, 1, 4, 7, 9]


@pytest.mark.parametrize(
    ("kind", "num_rows"), [(_C.AccessCounter, 50_000_000), (_C.DirtyRows, 1_600_000_000)]
)
def test_rows_that_are_never_looked_up_take_no_memory(kind, num_rows):
    """So a worker that replaces one which was lost starts as fast with large tables."""
    meter = MemoryMeter()
    tracker = kind(name="t", num_rows=num_rows)
    tracker.observe(np.array([0, num_rows // 2, num_rows - 1]))
    assert tracker.memory_bytes() - 200_000_000 in range(1_000_000)
    assert meter.grown_bytes() < 20e6
    assert tracker.num_dirty() == 3
