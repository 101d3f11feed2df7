"""Which changes of clean rows a table's hashes find, on the CPU and on a device."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import RowIndexError, UsageError
from python_tests.csrc import backends
from python_tests.csrc.backends import KINDS
from python_tests.examples import examples

ROWS = 257
row_sets = st.sets(st.integers(0, ROWS - 1))


def make_arrays(row_bytes=(12, 4), seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (ROWS, size), dtype=np.uint8) for size in row_bytes]


class Hashed:
    """A table of a backend, whose rows are recorded, and its tracker."""

    def __init__(self, backend, arrays, *, dirty=(), kind="DirtyRows"):
        self.backend, self.arrays = backend, [backend.put(array) for array in arrays]
        options = {"name": "a", "num_rows": ROWS}
        if backend.device is None:
            self.hashes = native.HostRowHashes(**options)
        else:
            self.hashes = backend.native.DeviceRowHashes(**options, device=backend.device)
        self.tracker = KINDS[kind](backend, "a", ROWS)
        self.native = getattr(self.tracker, "tracker", self.tracker)
        self.tracker.observe(np.array(sorted(dirty), dtype=np.int64))
        self.hashes.record_range(self.arrays, 0, ROWS)

    def flip(self, array, row, byte=0, bit=0):
        self.arrays[array][row, byte] ^= 1 << bit

    def compare(self, begin=0, end=ROWS):
        """First row that differs, rows that were compared, rows without a hash."""
        if self.backend.device is None:
            return self.hashes.compare_range(self.arrays, self.native, begin, end)
        return self.hashes.begin_compare(self.arrays, self.native, begin, end).read()


def compare_changing(tables, row_ids, pool=None):
    """What is found of rows of each table that are about to change."""
    each = zip(*((t.hashes, t.arrays, t.native) for t in tables), strict=True)
    return native.compare_changing(*map(list, each), [row_ids] * len(tables), pool)


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


@examples(20)
@given(
    row_bytes=st.one_of(
        st.lists(st.integers(1, 70), min_size=1, max_size=3),
        st.sampled_from([[64], [256, 4], [12, 4], [3], [130, 2, 1], [8, 16, 24], [1] * 32]),
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_hash_is_what_is_described(backend, row_bytes, seed):
    arrays = make_arrays(row_bytes, seed)
    expected = [hash_of([array[row].tobytes() for array in arrays]) for row in range(ROWS)]
    assert Hashed(backend, arrays).hashes.range_values(0, ROWS).tolist() == expected


def test_every_single_bit_is_found(backend):
    table, missed = Hashed(backend, make_arrays((12, 4))), 0
    for row in range(ROWS) if backend.name == "cpu" else (0, 31, ROWS - 1):
        for array, num_bits in ((0, 96), (1, 32)):
            for bit in range(num_bits):
                table.flip(array, row, bit // 8, bit % 8)
                missed += table.compare(row, row + 1)[0] != row
                table.flip(array, row, bit // 8, bit % 8)
    assert missed == 0
    assert table.compare() == (-1, ROWS, 0)


def test_a_write_to_all_rows_is_found_in_nearly_all():
    torch.manual_seed(0)
    for change in (torch.neg, lambda weight: 0.999 * weight, lambda weight: weight.flip(1)):
        weight = torch.randn(ROWS, 16)
        table = Hashed(backends.find("cpu"), [weight.numpy()])
        weight.copy_(change(weight.clone()))
        found = [table.compare(row, row + 1)[0] == row for row in range(ROWS)]
        assert sum(found) >= ROWS - 1


@pytest.mark.parametrize("kind", KINDS)
@examples(15)
@given(dirty=row_sets, changed=row_sets, recorded=row_sets)
def test_dirty_and_recorded_rows_may_change_and_the_first_other_one_is_named(
    backend, kind, dirty, changed, recorded
):
    table = Hashed(backend, make_arrays(), dirty=dirty, kind=kind)
    for row in changed:
        table.flip(1, row)
    ids = np.array(sorted(recorded), dtype=np.int64)
    table.hashes.record(table.arrays, ids)
    named = sorted(changed - dirty - recorded)
    seen = range(named[0] + 1 if named and backend.device is None else ROWS)  # the CPU stops there
    assert table.compare() == ([*named, -1][0], len(set(seen) - dirty), 0)
    for row in named[:1]:
        assert table.compare(row + 1)[0] == ([*named[1:], -1][0])
        assert table.compare(0, row) == (-1, row - len([d for d in dirty if d < row]), 0)
    if backend.name == "cpu":
        everything = np.arange(ROWS, dtype=np.int64)
        first = table.hashes.compare(table.arrays, table.native, everything)[0]
        assert first == [*named, -1][0]


def test_rows_of_unknown_hash_are_counted(backend):
    table = Hashed(backend, make_arrays((8,)), dirty=[3])
    table.hashes.forget()
    assert not table.hashes.range_values(0, ROWS).any()
    for _ in range(2):
        assert table.compare() == (-1, 0, ROWS - 1)
    table.hashes.record(table.arrays, np.array([3]))
    assert table.hashes.range_values(3, 4) != 0


@given(
    st.lists(st.integers(0, ROWS - 1), max_size=400),
    row_sets,
    st.lists(row_sets, min_size=1, max_size=4),
    st.sampled_from([1, 1000]),  # times: so many rows are shared out among threads
)
def test_rows_that_are_about_to_change_are_compared_once(row_ids, dirty, changed, times):
    dirty |= set(row_ids[: len(row_ids) // 3])
    tables = [Hashed(backends.find("cpu"), make_arrays(), dirty=dirty) for _ in changed]
    for table, rows in zip(tables, changed, strict=True):
        for row in rows:
            table.flip(1, row)
    ids, pool = np.array(row_ids * times, dtype=np.int64), native.ThreadPool(num_threads=3)
    compared = [row_id for row_id in dict.fromkeys(row_ids) if row_id not in dirty]
    found = compare_changing(tables, ids, pool)
    for table, rows, (row, num_compared, _) in zip(tables, changed, found, strict=True):
        assert row == next((row_id for row_id in compared if row_id in rows), -1)
        assert num_compared == len(compared)
        known = table.hashes.range_values(0, ROWS) != 0
        assert {row_id for row_id in range(ROWS) if not known[row_id]} == set(row_ids)
    assert compare_changing(tables, ids, pool) == [(-1, 0, 0)] * len(tables)
    with pytest.raises(UsageError, match="each table needs"):
        native.compare_changing([tables[0].hashes], [], [], [])
    with pytest.raises(RowIndexError):
        compare_changing(tables, np.array([ROWS]), pool)


def test_threads_change_no_hash():
    weight = torch.arange(200_000 * 2, dtype=torch.float32).view(-1, 2)
    hashes = native.HostRowHashes(name="a", num_rows=len(weight))
    tracker = native.DirtyRows(name="a", num_rows=len(weight))
    hashes.record_range([weight], 0, len(weight), native.ThreadPool(num_threads=2))
    assert hashes.compare_range([weight], tracker, 0, len(weight)) == (-1, len(weight), 0)


def test_rows_that_a_tracker_has_chosen_on_a_device(device):
    table = Hashed(device, make_arrays((8,)), dirty=[2, 5, 40, 64], kind="AccessCounter")
    for row in (2, 5, 30, 40, 50, 60, 64):
        table.flip(0, row)
    assert table.compare(5, 62) == (30, 55, 0)  # without 5 and 40
    assert table.compare(3, 3) == (-1, 0, 0)
    chosen = table.tracker.begin_select(0, ROWS, 10)
    assert chosen.read().tolist() == [2, 5, 40, 64]
    table.hashes.record_chosen(table.arrays, chosen)
    table.tracker.take_range(0, ROWS)
    assert table.compare() == (30, ROWS, 0)
    assert table.compare(61) == (-1, ROWS - 61, 0)


def test_what_does_not_fit_is_refused(backend):
    table = Hashed(backend, make_arrays((8,)))
    for begin, end in ((-1, 3), (4, 3), (0, ROWS + 1)):
        with pytest.raises(UsageError, match="is not inside its rows"):
            table.compare(begin, end)
    with pytest.raises(RowIndexError):
        table.hashes.record(table.arrays, np.array([0, ROWS]))
    if backend.name == "cpu":
        record, array = table.hashes.record_range, table.arrays[0]
        for call, words in [
            (lambda: table.hashes.compare([array], table.native, np.array([-1])), "is -1"),
            (lambda: record([array[:-1]], 0, 3), "an array has 256 rows"),
            (lambda: record([], 0, 3), "no arrays"),
            (lambda: native.HostRowHashes(name="a", num_rows=0), "at least 1"),
        ]:
            with pytest.raises(UsageError, match=words):
                call()
        return
    many = Hashed(backend, make_arrays((1,) * 33))
    assert not many.hashes.range_values(0, ROWS).any()
    with pytest.raises(UsageError, match="33 arrays; the most that are compared is 32"):
        many.compare()
    other = native.DirtyRows(name="a", num_rows=ROWS)
    with pytest.raises((UsageError, TypeError)):
        table.hashes.begin_compare(table.arrays, other, 0, ROWS)
