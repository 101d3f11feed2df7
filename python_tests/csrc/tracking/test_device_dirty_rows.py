"""csrc/tracking/cuda/dirty_rows.h, and the bits that all trackers on a device mark rows with;
test_any_tracker.py holds it to DirtyRows."""

import numpy as np
import pytest

from cpr_ext.errors import CudaError, UsageError
from python_tests.csrc.backends import live_bytes


@pytest.mark.parametrize("begin", [0, 1, 31, 32, 33, 4095])
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 64, 9000])
def test_rows_of_any_range_are_counted_and_listed(device, begin, size):
    dirty = np.unique(np.random.default_rng(size).integers(0, 20_000, 6000))
    tracker = device.dirty_rows("t", 20_000)
    tracker.observe(dirty)
    end = begin + size
    expected = dirty[(begin <= dirty) & (dirty < end)]
    assert tracker.num_dirty(begin, end) == len(expected)
    assert tracker.is_clean(begin, end) == (len(expected) == 0)
    np.testing.assert_array_equal(tracker.dirty_rows(begin, end), expected)
    half = len(expected) // 2
    np.testing.assert_array_equal(tracker.select(begin, end, half), expected[:half])


def test_more_words_than_the_largest_grid_has_threads_are_counted(device):
    threads = 2048 * 256
    words = np.array([0, 1, threads - 1, threads, threads + 1, threads + 200])
    tracker = device.dirty_rows("t", 32 * (threads + 300))
    tracker.observe(np.concatenate([32 * words, 32 * words + 31]))
    assert tracker.num_dirty() == 2 * len(words)
    assert tracker.num_dirty(32 * threads, 32 * (threads + 1)) == 2


def test_it_takes_one_bit_per_row(emulated):
    before = live_bytes(emulated)
    tracker = emulated.dirty_rows("t", 100_001)
    assert tracker.memory_bytes() == 4 * 3126
    assert live_bytes(emulated) - before == 4 * 3126 + 4  # and whether a fault is noted
    del tracker
    assert live_bytes(emulated) == before


def test_a_batch_of_26_tables_is_one_launch_and_allocates_nothing(emulated):
    trackers = [emulated.dirty_rows(f"t{i}", 1000).tracker for i in range(26)]
    batch = [np.arange(100) for _ in trackers]
    emulated.native.emulator.calls()
    emulated.native.count_lookups(trackers, batch)
    assert emulated.native.emulator.calls() == {"cudaLaunchKernelEx": 1}


@pytest.mark.parametrize("nth", range(1, 12))
@pytest.mark.parametrize(
    "call", ["cudaMallocFromPoolAsync", "cudaLaunchKernelEx", "cudaMemcpyAsync"]
)
def test_a_call_that_fails_leaves_the_rows_as_they_are(emulated, call, nth):
    tracker = emulated.dirty_rows("t", 1000)
    tracker.observe(np.arange(200))
    for attempt in (tracker.dirty_rows, lambda: tracker.take_range(0, 100)):
        emulated.native.emulator.fail_call(call, nth)
        try:
            result = attempt()
        except CudaError:
            pass
        else:  # not every call is made so often
            emulated.native.emulator.fail_call("", 0)
            if not isinstance(result, np.ndarray):
                tracker.put_back(result)
        emulated.native.emulator.fail_call("", 0)
        assert tracker.dirty_rows().tolist() == list(range(200))


def asked_together(emulated):
    """A tracker of each kind, on the device and on the host, and how many rows it has dirty."""
    kinds = {
        "AccessCounter": {},
        "DirtyRows": {},
        "RowSampler": {"capacity": 5, "period": 1},
    }
    trackers = []
    for prefix, place in (("Device", {"device": 0}), ("", {})):
        for number, (kind, options) in enumerate(kinds.items()):
            make = getattr(emulated.native, prefix + kind)
            made = make(name="t", num_rows=90, **place, **options)
            made.observe(np.arange(10, 20 + number))
            trackers.append((made, 10 + number))
    return trackers


def test_trackers_that_are_asked_together_wait_for_the_device_once(emulated):
    trackers = asked_together(emulated)
    emulated.native.emulator.calls()
    natives = [tracker for tracker, _ in trackers]
    assert emulated.native.num_dirty_of(natives) == [count for _, count in trackers]
    assert emulated.native.emulator.calls()["cudaEventSynchronize"] == 1
    assert emulated.native.num_dirty_of([]) == []


@pytest.mark.parametrize("dirty", [None, 0, 2, 3, 5])
def test_trackers_are_clean_if_none_has_a_dirty_row_in_its_range(emulated, dirty):
    trackers = [tracker for tracker, _ in asked_together(emulated)]
    begins, ends = [0] * 6, [10] * 6
    if dirty is not None:
        begins[dirty], ends[dirty] = 19, 20
    assert emulated.native.are_clean(trackers, begins, ends) == (dirty is None)
    with pytest.raises(UsageError, match="equally many"):
        emulated.native.are_clean(trackers, begins, ends[:2])
    with pytest.raises(UsageError, match="is not inside its rows"):
        emulated.native.are_clean(trackers, begins, [91] * 6)
