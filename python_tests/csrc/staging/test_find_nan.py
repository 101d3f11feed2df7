"""csrc/staging/find_nan.h: the first NaN of a float array, by bits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from python_tests.csrc.segments import SANITIZER

pytestmark = pytest.mark.usefixtures("every_instruction_set")

BITS = {np.float16: np.uint16, np.float32: np.uint32, np.float64: np.uint64}


def _reference(array):
    hits = np.flatnonzero(np.isnan(array.reshape(-1)))
    return int(hits[0]) if hits.size else -1


@pytest.mark.parametrize("dtype", BITS)
@given(
    st.integers(0, 6000),
    st.lists(st.integers(0, 5999), max_size=3),
    st.integers(0, 1),
    st.integers(0, 2**32),
)
def test_the_first_nan_is_found_wherever_it_lies(dtype, size, places, shift, seed):
    """At any byte, too."""
    raw = np.zeros(size * np.dtype(dtype).itemsize + shift, np.uint8)
    array = raw[shift:].view(dtype)
    array[:] = np.random.default_rng(seed).standard_normal(size)
    for place in places:
        if place < size:
            array[place] = np.nan
    assert native.find_nan(array) == _reference(array)


@pytest.mark.parametrize("dtype", BITS)
@given(data=st.data())
def test_any_bit_pattern_is_judged_as_numpy_judges_it(dtype, data):
    """Drawn near those of infinities, where it matters."""
    bits, info = BITS[dtype], np.finfo(dtype)
    top = int(np.iinfo(bits).max)
    infinity = int(np.array(np.inf, dtype).view(bits))
    near = st.integers(infinity - 1, infinity + 1)
    anything = st.one_of(st.integers(0, top), near, near.map(lambda n: n + (top + 1) // 2))
    drawn = data.draw(st.lists(anything, min_size=1, max_size=40))
    array = np.array([*np.array([info.max, info.tiny], dtype).view(bits), *drawn], bits)
    assert native.find_nan(array.view(dtype)) == _reference(array.view(dtype))


@pytest.mark.skipif(SANITIZER != "", reason="torch's own threads are not for our sanitizers")
def test_every_bfloat16_bit_pattern_is_judged_as_torch_judges_it():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    nans = torch.isnan(every)
    assert native.find_nan(every[~nans]) == -1
    assert all(native.find_nan(one.reshape(1)) == 0 for one in every[nans])
    for place in (0, 1, 2047, 2048, 4999):
        array = torch.ones(5000, dtype=torch.bfloat16)
        array[place] = float("nan")
        assert native.find_nan(array) == place


def test_types_without_nan_have_none_and_an_array_with_gaps_is_refused():
    for dtype in (np.int64, np.uint8, np.bool_):
        assert native.find_nan(np.ones(100, dtype)) == -1
    with pytest.raises(UsageError, match="contiguous"):
        native.find_nan(np.zeros((4, 4), np.float32)[:, :2])
