"""Hashes of a table on a device: those of the CPU, and compared where they are."""

import numpy as np
import pytest

from cpr_ext.errors import RowIndexError, UsageError
from python_tests.csrc import backends

ROWS = 75
TRACKERS = {
    "mfu": lambda b, weight: b.access_counter("a", ROWS),
    "ssu": lambda b, weight: b.row_sampler("a", ROWS, capacity=ROWS),
    "scar": lambda b, weight: b.change_meter("a", weight),
    "all": lambda b, weight: b.dirty_rows("a", ROWS),
}


@pytest.fixture(params=backends.DEVICE_NAMES)
def backend(request):
    return backends.find(request.param)


def make_arrays(row_bytes, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (ROWS, size), dtype=np.uint8) for size in row_bytes]


class Hashed:
    """A table on a device, whose rows are recorded."""

    def __init__(self, backend, arrays, *, dirty=(), kind="all"):
        self.backend, self.arrays = backend, [backend.put(array) for array in arrays]
        self.hashes = backend.native.DeviceRowHashes(name="a", num_rows=ROWS, device=backend.device)
        self.tracker = TRACKERS[kind](backend, np.zeros((ROWS, 4), np.float32))
        self.tracker.observe(np.array(dirty, dtype=np.int64))
        self.hashes.record_range(self.arrays, 0, ROWS)

    def flip(self, array, row, byte, bit):
        self.arrays[array][row, byte] ^= 1 << bit

    def compare(self, begin=0, end=ROWS, stride=1):
        native = getattr(self.tracker, "tracker", self.tracker)
        return self.hashes.begin_compare(self.arrays, native, begin, end, stride).read()


@pytest.mark.parametrize(
    "row_bytes",
    [(64,), (256, 4), (12, 4), (3,), (130, 2, 1), (8, 16, 24), (1,) * 32],
    ids=lambda sizes: "-".join(map(str, sizes[:3])),
)
def test_hashes_are_those_of_the_cpu(backend, row_bytes):
    arrays = make_arrays(row_bytes)
    on_host = backends.native.HostRowHashes(name="a", num_rows=ROWS)
    on_host.record_range(arrays, 0, ROWS)
    on_device = Hashed(backend, arrays).hashes
    np.testing.assert_array_equal(
        on_device.range_values(0, ROWS), on_host.range_values(0, ROWS), strict=True
    )


def test_every_single_bit_is_found(backend):
    table = Hashed(backend, make_arrays((12, 3)))
    for row in (0, 31, ROWS - 1):
        for array, num_bits in ((0, 96), (1, 24)):
            for bit in range(num_bits):
                table.flip(array, row, bit // 8, bit % 8)
                assert table.compare() == (row, ROWS, 0)
                table.flip(array, row, bit // 8, bit % 8)
    assert table.compare() == (-1, ROWS, 0)


@pytest.mark.parametrize("kind", TRACKERS)
def test_the_first_row_that_differs_and_is_clean_is_named(backend, kind):
    table = Hashed(backend, make_arrays((8,)), dirty=[5, 40], kind=kind)
    for row in (40, 60, 50, 5):
        table.flip(0, row, 0, 0)
    assert table.compare() == (50, ROWS - 2, 0)
    assert table.compare(51) == (60, ROWS - 51, 0)
    assert table.compare(5, 62, 5) == (50, 10, 0)  # 5, 10 ... 60, without 5 and 40
    assert table.compare(5, 8, 55) == (-1, 0, 0)
    assert table.compare(3, 3) == (-1, 0, 0)


def test_rows_of_unknown_hash_are_counted(backend):
    table = Hashed(backend, make_arrays((8,)), dirty=[3])
    table.hashes.forget()
    assert not table.hashes.range_values(0, ROWS).any()
    for _ in range(2):
        assert table.compare() == (-1, 0, ROWS - 1)
    table.flip(0, 3, 0, 0)
    table.hashes.record(table.arrays, np.array([3]))
    assert table.hashes.range_values(3, 4) != 0


def test_rows_that_a_tracker_has_chosen_are_recorded_on_the_device(backend):
    table = Hashed(backend, make_arrays((8,)), dirty=[2, 64], kind="mfu")
    for row in (2, 30, 64):
        table.flip(0, row, 0, 0)
    chosen = table.tracker.begin_select(0, ROWS, 10)
    assert chosen.read().tolist() == [2, 64]
    table.hashes.record_chosen(table.arrays, chosen)
    table.tracker.take_range(0, ROWS)
    assert table.compare() == (30, ROWS, 0)


def test_what_does_not_fit_is_refused(backend):
    table = Hashed(backend, make_arrays((8,)))
    with pytest.raises(UsageError, match="is not inside its rows"):
        table.compare(0, ROWS + 1)
    with pytest.raises(UsageError, match="stride must be at least 1"):
        table.compare(stride=0)
    with pytest.raises(RowIndexError):
        table.hashes.record(table.arrays, np.array([ROWS]))
    many = Hashed(backend, make_arrays((1,) * 33))
    assert not many.hashes.range_values(0, ROWS).any()
    with pytest.raises(UsageError, match="33 arrays; the most that are compared is 32"):
        many.compare()
    other = backends.native.DirtyRows(name="a", num_rows=ROWS)
    with pytest.raises((UsageError, TypeError)):
        table.hashes.begin_compare(table.arrays, other, 0, ROWS)
