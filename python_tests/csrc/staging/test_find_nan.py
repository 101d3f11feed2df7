"""csrc/staging/find_nan.h: the first NaN of a float array, by bits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import UsageError

pytestmark = pytest.mark.usefixtures("every_instruction_set")

BITS = {np.float16: np.uint16, np.float32: np.uint32, np.float64: np.uint64}


def _reference(array: np.ndarray) -> int:
    hits = np.flatnonzero(np.isnan(array.reshape(-1)))
    return int(hits[0]) if hits.size else -1


@pytest.mark.parametrize("dtype", BITS)
@given(st.integers(0, 6000), st.lists(st.integers(0, 5999), max_size=3), st.integers(0, 2**32))
def test_the_first_nan_is_found_wherever_it_lies(dtype, size, places, seed):
    array = np.random.default_rng(seed).standard_normal(size).astype(dtype)
    for place in places:
        if place < size:
            array[place] = np.nan
    assert native.find_nan(array) == _reference(array)


@pytest.mark.parametrize("dtype", BITS)
@given(data=st.data())
def test_any_bit_pattern_is_judged_as_numpy_judges_it(dtype, data):
    bits = BITS[dtype]
    top = int(np.iinfo(bits).max)
    array = np.array(data.draw(st.lists(st.integers(0, top), min_size=1, max_size=40)), bits)
    assert native.find_nan(array.view(dtype)) == _reference(array.view(dtype))


@pytest.mark.parametrize("dtype", BITS)
def test_infinities_and_the_largest_numbers_are_no_nan_but_any_payload_is(dtype):
    info = np.finfo(dtype)
    good = np.array([np.inf, -np.inf, info.max, info.min, info.tiny, 0.0, -0.0], dtype)
    assert native.find_nan(good) == -1
    infinity = np.array([np.inf], dtype).view(BITS[dtype])
    for payload in (infinity + 1, ~np.zeros(1, BITS[dtype])):  # smallest signalling, all ones
        assert native.find_nan(np.concatenate([good, payload.view(dtype)])) == len(good)


@pytest.mark.parametrize("dtype", BITS)
def test_an_array_that_starts_at_any_byte_is_searched(dtype):
    size = np.dtype(dtype).itemsize
    raw = np.zeros(5000 * size + 1, np.uint8)
    array = raw[1:].view(dtype)
    assert native.find_nan(array) == -1
    array[4321] = np.nan
    assert native.find_nan(array) == 4321


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_])
def test_types_without_nan_have_none(dtype):
    assert native.find_nan(np.ones(100, dtype)) == -1


def test_an_array_with_gaps_is_refused():
    with pytest.raises(UsageError, match="contiguous"):
        native.find_nan(np.zeros((4, 4), np.float32)[:, :2])
