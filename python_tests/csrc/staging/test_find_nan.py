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


@pytest.mark.parametrize("dtype", BITS)
@given(data=st.data(), size=st.integers(0, 6000), shift=st.integers(0, 1))
def test_the_first_nan_is_found_wherever_it_lies_and_any_bits_are_judged_as_numpys(
    dtype, data, size, shift
):
    """At any byte, too; bits are drawn near those of infinities, where it matters."""
    bits, info = BITS[dtype], np.finfo(dtype)
    array = np.zeros(size * info.dtype.itemsize + shift, np.uint8)[shift:].view(dtype)
    array[:] = np.random.default_rng(size).standard_normal(size)
    top, infinity = int(np.iinfo(bits).max), int(np.array(np.inf, dtype).view(bits))
    near = st.integers(infinity - 1, infinity + 1)
    anything = st.one_of(st.integers(0, top), near, near.map(lambda n: n + (top + 1) // 2))
    places = st.tuples(st.integers(0, max(0, size - 1)), anything)
    for place, drawn in data.draw(st.lists(places, max_size=4)):
        array.view(bits)[place : place + 1] = drawn
    hits = np.flatnonzero(np.isnan(array))
    assert native.find_nan(array) == (int(hits[0]) if hits.size else -1)


@pytest.mark.skipif(SANITIZER != "", reason="torch's own threads are not for our sanitizers")
def test_every_bfloat16_bit_pattern_is_judged_as_torch_judges_it():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    nans = torch.isnan(every)
    assert native.find_nan(every[~nans]) == -1
    assert all(native.find_nan(one.reshape(1)) == 0 for one in every[nans])


def test_types_without_nan_have_none_and_an_array_with_gaps_is_refused():
    for dtype in (np.int64, np.uint8, np.bool_):
        assert native.find_nan(np.ones(100, dtype)) == -1
    with pytest.raises(UsageError, match="contiguous"):
        native.find_nan(np.zeros((4, 4), np.float32)[:, :2])
