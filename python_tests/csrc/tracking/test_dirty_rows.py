import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext import _C
from python_tests.examples import examples


def test_the_lowest_dirty_rows_are_selected():
    tracker = _C.DirtyRows(name="t", num_rows=200)
    tracker.observe(np.array([150, 3, 64, 63, 3]))
    assert tracker.select(0, 200, 3).tolist() == [3, 63, 64]
    assert tracker.select(4, 151, 9).tolist() == [63, 64, 150]
    assert tracker.select(0, 200, 0).tolist() == []


@examples(200)
@given(
    num_rows=st.sampled_from([1, 63, 64, 65, 127, 128, 129, 1000]),
    data=st.data(),
    dtype=st.sampled_from([np.int32, np.int64]),
)
def test_a_range_cuts_at_any_bit(num_rows, data, dtype):
    edges = [e for e in (0, 1, 62, 63, 64, 65, 127, 128, 129) if e <= num_rows]
    begin = data.draw(st.sampled_from(edges))
    end = data.draw(st.sampled_from([e for e in [*edges, num_rows] if e >= begin]))
    tracker = _C.DirtyRows(name="t", num_rows=num_rows)
    tracker.observe(np.arange(num_rows, dtype=dtype))
    assert tracker.num_dirty(begin, end) == end - begin
    assert tracker.dirty_rows(begin, end).tolist() == list(range(begin, end))
    assert tracker.take_range(begin, end).row_ids.tolist() == list(range(begin, end))
    assert tracker.dirty_rows().tolist() == [*range(begin), *range(end, num_rows)]


@pytest.mark.parametrize("num_rows", [1, 64, 65, 1_000_000])
def test_it_takes_one_bit_per_row(num_rows):
    words = (num_rows + 63) // 64
    assert _C.DirtyRows(name="t", num_rows=num_rows).memory_bytes() == 8 * words


def test_taken_rows_hold_only_what_was_dirty():
    tracker = _C.DirtyRows(name="t", num_rows=100)
    tracker.observe(np.array([10, 20]))
    taken = tracker.take(np.arange(15))
    assert taken.num_rows == 1
    assert taken.row_ids.tolist() == [10]
    assert tracker.dirty_rows().tolist() == [20]
