"""Which changes of clean rows a table's hashes find."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import RowIndexError, UsageError

ROWS = 257


def make_arrays(seed=0, row_bytes=(12, 4)):
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (ROWS, size), dtype=np.uint8) for size in row_bytes]


def make(arrays, *, dirty=()):
    hashes = native.HostRowHashes(name="a", num_rows=ROWS)
    tracker = native.DirtyRows(name="a", num_rows=ROWS)
    tracker.observe(np.array(dirty, dtype=np.int64))
    hashes.record_range(arrays, 0, ROWS)
    return hashes, tracker


def compare_changing(hashes, arrays, tracker, row_ids):
    return native.compare_changing([hashes], [arrays], [tracker], [row_ids])[0]


def test_every_single_bit_of_every_row_is_found():
    arrays = make_arrays()
    hashes, tracker = make(arrays)
    num_bits = 8 * sum(array.shape[1] for array in arrays)
    missed = 0
    for row in range(ROWS):
        for bit in range(num_bits):
            array, byte = (arrays[0], bit // 8) if bit < 96 else (arrays[1], bit // 8 - 12)
            array[row, byte] ^= 1 << bit % 8
            missed += hashes.compare_range(arrays, tracker, row, row + 1)[0] != row
            array[row, byte] ^= 1 << bit % 8
    assert missed == 0
    assert hashes.compare_range(arrays, tracker, 0, ROWS) == (-1, ROWS, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.neg_(),
        lambda weight: weight.mul_(0.999),
        lambda weight: weight.copy_(weight.flip(1).clone()),
        lambda weight: weight.zero_(),
        lambda weight: weight.roll(1, 0).clone().view_as(weight),
    ],
)
def test_a_write_to_all_rows_is_found_in_nearly_all(change):
    torch.manual_seed(0)
    weight = torch.randn(ROWS, 16)
    hashes, tracker = make([weight])
    weight.copy_(change(weight.clone()))
    found = [hashes.compare_range([weight], tracker, row, row + 1)[0] == row for row in range(ROWS)]
    assert sum(found) >= ROWS - 1


@given(st.sets(st.integers(0, ROWS - 1)), st.sets(st.integers(0, ROWS - 1), min_size=1))
def test_rows_that_are_dirty_may_change_and_the_first_other_one_is_named(dirty, changed):
    arrays = make_arrays()
    hashes, tracker = make(arrays, dirty=sorted(dirty))
    arrays[1][sorted(changed)] ^= 1
    first = min(changed - dirty, default=-1)
    assert hashes.compare_range(arrays, tracker, 0, ROWS)[0] == first
    ids = np.arange(ROWS, dtype=np.int64)
    assert hashes.compare(arrays, tracker, ids)[0] == first


@given(st.sets(st.integers(0, ROWS - 1)))
def test_recorded_rows_are_taken_as_they_are(row_ids):
    arrays = make_arrays()
    hashes, tracker = make(arrays)
    arrays[0][:] = make_arrays(seed=1)[0]
    hashes.record(arrays, np.array(sorted(row_ids), dtype=np.int64))
    first = next((row for row in range(ROWS) if row not in row_ids), -1)
    assert hashes.compare_range(arrays, tracker, 0, ROWS)[0] == first


def test_rows_of_unknown_hash_are_counted():
    arrays = make_arrays()
    hashes, tracker = make(arrays, dirty=[3])
    hashes.forget()
    for _ in range(2):
        assert hashes.compare_range(arrays, tracker, 0, ROWS) == (-1, 0, ROWS - 1)


@given(
    st.lists(st.integers(0, ROWS - 1), max_size=400),
    st.sets(st.integers(0, ROWS - 1)),
    st.sets(st.integers(0, ROWS - 1)),
)
def test_rows_that_are_about_to_change_are_compared_once(row_ids, dirty, changed):
    arrays = make_arrays()
    hashes, tracker = make(arrays, dirty=sorted(dirty))
    arrays[1][sorted(changed)] ^= 1
    ids = np.array(row_ids, dtype=np.int64)
    row, num_compared, _ = compare_changing(hashes, arrays, tracker, ids)
    compared = [row_id for row_id in dict.fromkeys(row_ids) if row_id not in dirty]
    assert row == next((row_id for row_id in compared if row_id in changed), -1)
    assert num_compared == len(compared)
    known = hashes.range_values(0, ROWS) != 0
    assert {row_id for row_id in range(ROWS) if not known[row_id]} == set(row_ids)
    assert compare_changing(hashes, arrays, tracker, ids) == (-1, 0, 0)


def hash_of(row):
    """The hash of a row, given as the bytes of its arrays, by its description in row_hash.h."""
    sum_, bits, key = 0, 0, 0
    for array in row:
        for at in range(0, len(array), 8):
            word = int.from_bytes(array[at : at + 8], "little")
            key = (key + 0x9E3779B97F4A7C15) % 2**64
            low, high = (word + key) % 2**32, ((word >> 32) + (key >> 32)) % 2**32
            sum_ = (sum_ + low * high) % 2**64
            bits ^= word
    mixed = (sum_ ^ sum_ >> 32) * 0xD6E8FEB86659FD93 % 2**64
    return (mixed >> 49 or 1) << 1 | bits.bit_count() % 2


@given(st.lists(st.integers(1, 70), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_a_hash_is_what_is_described(row_bytes, seed):
    arrays = make_arrays(seed, row_bytes)
    hashes, _ = make(arrays)
    expected = [hash_of([array[row].tobytes() for array in arrays]) for row in range(ROWS)]
    assert hashes.range_values(0, ROWS).tolist() == expected


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_hash(threads):
    weight = torch.arange(200_000 * 2, dtype=torch.float32).view(-1, 2)
    hashes = native.HostRowHashes(name="a", num_rows=len(weight))
    tracker = native.DirtyRows(name="a", num_rows=len(weight))
    hashes.record_range([weight], 0, len(weight), native.ThreadPool(num_threads=threads))
    assert hashes.compare_range([weight], tracker, 0, len(weight)) == (-1, len(weight), 0)


def test_values_are_compared_as_bits():
    weight = torch.tensor([[0.0, float("nan")], [float("inf"), 1e-45]])
    hashes = native.HostRowHashes(name="a", num_rows=2)
    tracker = native.DirtyRows(name="a", num_rows=2)
    hashes.record_range([weight], 0, 2)
    assert hashes.compare_range([weight], tracker, 0, 2)[0] == -1
    weight[0, 0] = -0.0
    assert hashes.compare_range([weight], tracker, 0, 2)[0] == 0


def test_rows_and_arrays_outside_of_the_table_are_refused():
    arrays = make_arrays()
    hashes, tracker = make(arrays)
    with pytest.raises(RowIndexError, match=r"row_ids\[1\] is 257"):
        hashes.record(arrays, np.array([0, ROWS]))
    with pytest.raises(RowIndexError):
        hashes.compare(arrays, tracker, np.array([-1]))
    for begin, end in [(-1, 3), (4, 3), (0, ROWS + 1)]:
        with pytest.raises(UsageError, match="is not inside its rows"):
            hashes.record_range(arrays, begin, end)
    with pytest.raises(UsageError, match="an array has 256 rows"):
        hashes.record_range([arrays[0][:-1]], 0, 3)
    with pytest.raises(UsageError, match="no arrays"):
        hashes.record_range([], 0, 3)
    with pytest.raises(UsageError, match="at least 1"):
        native.HostRowHashes(name="a", num_rows=0)
