"""csrc/core/packed_row_ids.h: ascending row ids by the scheme of Elias and Fano."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import UsageError

id_sets = st.one_of(
    st.sets(st.integers(0, 300), min_size=1),
    st.sets(st.integers(0, 2**62 - 1), min_size=1, max_size=80),
    st.builds(lambda n, start: set(range(start, start + n)), st.integers(1, 200), st.integers(0)),
).filter(lambda ids: max(ids) < 2**62)


def reference_bytes(count: int, first: int, last: int) -> int:
    span = last - first + 1
    low = (span // count).bit_length() - 1
    return -(-count * low // 8) + -(-(((span - 1) >> low) + count) // 8)


@given(id_sets)
def test_ids_come_back_from_the_bytes_that_the_formula_gives(ids):
    row_ids = np.array(sorted(ids))
    run = (len(row_ids), int(row_ids[0]), int(row_ids[-1]))
    packed = native.pack_row_ids(row_ids)
    assert len(packed) == native.packed_row_id_bytes(*run) == reference_bytes(*run)
    assert len(packed) <= 8 * len(row_ids)
    np.testing.assert_array_equal(native.unpack_row_ids(packed, *run), row_ids)


@given(id_sets, st.data())
def test_bytes_that_are_not_of_such_ids_never_give_others(ids, data):
    row_ids = np.array(sorted(ids))
    run = (len(row_ids), int(row_ids[0]), int(row_ids[-1]))
    packed = native.pack_row_ids(row_ids)
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    found = native.unpack_row_ids(packed, *run)
    if found is not None:
        assert (np.diff(found) > 0).all()
        assert (found[0], found[-1]) == (row_ids[0], row_ids[-1])


def test_an_eighth_of_all_rows_takes_five_bits_a_row():
    generator = np.random.default_rng(1)
    row_ids = np.flatnonzero(generator.random(800_000) < 0.125)
    assert len(native.pack_row_ids(row_ids)) * 8 / len(row_ids) < 5.01


def test_no_ids_take_no_bytes():
    assert len(native.pack_row_ids(np.array([], np.int64))) == 0


def test_what_is_no_run_of_ids_is_refused():
    with pytest.raises(UsageError, match="row_ids must ascend"):
        native.pack_row_ids(np.array([1, 3, 3, 4]))
    with pytest.raises(UsageError, match="there are no 3 row ids from 5 to 6"):
        native.packed_row_id_bytes(3, 5, 6)
    with pytest.raises(UsageError, match="packed has 9 bytes; needed are"):
        native.unpack_row_ids(np.zeros(9, np.uint8), 2, 0, 5)
