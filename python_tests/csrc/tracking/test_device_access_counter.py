"""csrc/tracking/cuda/access_counter.h: what differs from AccessCounter, which test_any_tracker.py
holds both to."""

import contextlib
import ctypes

import numpy as np
import pytest

from cpr_ext.errors import CudaError, RowIndexError, UsageError
from python_tests.csrc import backends, reference
from python_tests.csrc.backends import live_bytes
from python_tests.helpers import run_python

HIGHEST_COUNT = 2**32 - 1


@pytest.mark.parametrize("skew", [1, 3, 64, 100_000])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("num_indices", [0, 1, 31, 33, 1023, 1025, 5000])
def test_any_skew_of_lookups_is_counted(device, skew, dtype, num_indices):
    indices = (np.random.default_rng(skew).integers(0, 3000, num_indices) // skew).astype(dtype)
    counter = device.access_counter("t", 3000)
    counter.observe(indices)
    np.testing.assert_array_equal(counter.counts(), np.bincount(indices, minlength=3000))
    assert counter.num_dirty() == len(np.unique(indices))


@pytest.mark.parametrize("num_tables", [1, 2, 26, 64, 65, 130])
def test_a_batch_of_many_tables_is_counted_table_by_table(device, num_tables):
    random = np.random.default_rng(num_tables)
    counters = [device.access_counter(f"t{i}", 50 + i) for i in range(num_tables)]
    batch = [random.integers(0, 50, random.integers(0, 100)) for _ in counters]
    trackers = [counter.tracker for counter in counters]
    device.native.count_lookups(trackers, [device.put(indices) for indices in batch])
    for i, (counter, indices) in enumerate(zip(counters, batch, strict=True)):
        np.testing.assert_array_equal(counter.counts(), np.bincount(indices, minlength=50 + i))


def test_a_batch_of_26_tables_is_one_launch_and_allocates_nothing(emulated):
    counters = [emulated.access_counter(f"t{i}", 1000).tracker for i in range(26)]
    batch = [np.arange(100) for _ in counters]
    emulated.native.emulator.calls()
    emulated.native.count_lookups(counters, batch)
    assert emulated.native.emulator.calls() == {"cudaLaunchKernelEx": 1}


def test_tables_on_the_cpu_and_on_a_device_share_a_batch(emulated):
    on_device = emulated.access_counter("a", 10).tracker
    on_host = emulated.native.AccessCounter(name="b", num_rows=10)
    emulated.native.count_lookups(
        [on_host, on_device, on_host], [np.array([1]), np.array([2, 2]), np.array([3])]
    )
    assert on_host.counts().tolist() == [0, 1, 0, 1, 0, 0, 0, 0, 0, 0]
    assert on_device.counts().tolist() == [0, 0, 2, 0, 0, 0, 0, 0, 0, 0]
    assert (on_host.device, on_device.device) == (None, 0)


NUM_ROWS = 1237  # no other memory has this size


def write_count(emulated, row_id, count):
    """Four thousand million lookups would take too long, so the test writes the memory itself."""
    memory = emulated.native.emulator.allocations()
    [address] = [where for where, size in memory.items() if size == 4 * NUM_ROWS]
    ctypes.c_uint32.from_address(address + 4 * row_id).value = count


def counter_with(emulated, row_id, count):
    counter = emulated.access_counter("t", NUM_ROWS)
    write_count(emulated, row_id, count)
    counter.put_back(counter.take_range(0, NUM_ROWS))  # it knows no more how high counts are
    return counter


def test_a_count_that_graphs_may_have_raised_stops_at_its_limit(emulated):
    counter = emulated.access_counter("t", NUM_ROWS)
    emulated.native.emulator.set_capturing(True)
    counter.observe(np.array([3]))
    emulated.native.emulator.set_capturing(False)
    counter.take_range(0, NUM_ROWS)
    write_count(emulated, 3, HIGHEST_COUNT - 1)
    emulated.native.emulator.replay_graph()
    counter.observe(np.array([3]))
    assert counter.counts()[3] == HIGHEST_COUNT


@pytest.mark.parametrize("below", [0, 1, 5, 40])
@pytest.mark.parametrize("num_lookups", [1, 4, 100])
def test_a_count_stops_at_its_limit(emulated, below, num_lookups):
    counter = counter_with(emulated, 3, HIGHEST_COUNT - below)
    counter.observe(np.full(num_lookups, 3))
    expected = min(HIGHEST_COUNT, HIGHEST_COUNT - below + num_lookups)
    assert counter.counts()[3] == expected
    assert counter.dirty_rows().tolist() == [3]


@pytest.mark.parametrize("below", [0, 1, 5])
def test_a_count_put_back_stops_at_the_limit(emulated, below):
    counter = counter_with(emulated, 3, HIGHEST_COUNT - below)
    taken = counter.take_range(0, 10)
    counter.observe(np.array([3, 3, 3]))
    counter.put_back(taken)
    assert counter.counts()[3] == min(HIGHEST_COUNT, HIGHEST_COUNT - below + 3)


def test_an_index_outside_the_table_is_told_at_the_next_batch_and_not_counted(device):
    counter = device.access_counter("users", 100)
    counter.observe(np.array([5, 100, 6]))
    assert counter.dirty_rows().tolist() == [5, 6]
    lookups = [device.put(np.array([7]))]
    with pytest.raises(
        RowIndexError, match=r"'users': index 100 at position 1 of an earlier .* 0 to 99"
    ):
        device.native.count_lookups([counter.tracker], lookups)
    assert counter.dirty_rows().tolist() == [5, 6, 7], "this batch is good"
    device.native.count_lookups([counter.tracker], lookups)  # told once


@pytest.mark.parametrize("bad", [100, -1])
def test_a_bad_index_among_as_many_good_ones_as_a_block_takes_is_told(device, bad):
    indices = np.full(4096, 5)
    indices[1700] = bad
    counter = device.access_counter("users", 100)
    counter.observe(indices)
    counter.num_dirty()  # the device has passed
    with pytest.raises(RowIndexError, match=f"index {bad} at position 1700 "):
        counter.report_faults()
    assert counter.counts()[5] == 4095


@pytest.mark.parametrize("bad", [-1, 100, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**32])
def test_one_of_several_bad_indices_is_told_once(device, bad):
    counter = device.access_counter("t", 100)
    counter.observe(np.array([bad] * 70 + [1]))
    counter.num_dirty()  # the device has passed
    with pytest.raises(RowIndexError, match=f"index {bad} at position [0-9]+ "):
        counter.report_faults()
    counter.report_faults()
    counter.observe(np.array([-5]))
    counter.num_dirty()
    with pytest.raises(RowIndexError, match="index -5 at position 0 "):
        counter.report_faults()
    assert counter.counts()[1] == 1


def test_dirty_rows_are_counted_in_tables_larger_than_a_launch_has_threads(emulated):
    threads = 2048 * 256
    counter = emulated.access_counter("t", threads + 40)
    row_ids = np.array([0, 7, threads + 7, threads + 39])  # one thread sees two of them
    counter.observe(row_ids)
    assert counter.num_dirty() == 4
    assert counter.dirty_rows().tolist() == row_ids.tolist()


def test_counts_are_a_copy(device):
    counter = device.access_counter("t", 4)
    counts = counter.counts()
    counter.observe(np.array([2, 2]))
    assert counts.tolist() == [0, 0, 0, 0]
    assert counter.counts().tolist() == [0, 0, 2, 0]


def test_taking_rows_waits_for_nothing(emulated):
    counter = emulated.access_counter("t", 1000)
    counter.observe(np.arange(500))
    emulated.native.emulator.set_lazy(True)
    emulated.native.emulator.calls()
    taken = [counter.take(np.arange(10, 20)), counter.take_range(400, 600)]
    calls = emulated.native.emulator.calls()
    assert "cudaStreamSynchronize" not in calls
    assert calls["cudaEventSynchronize"] == 1  # that of an upload's block, long free
    assert [t.num_rows for t in taken] == [10, 100]
    assert counter.num_dirty() == 390


def test_rows_taken_are_those_of_the_moment_they_were_taken(emulated):
    emulated.native.emulator.set_lazy(True)
    counter = emulated.access_counter("t", 10)
    first, second = np.array([3, 3]), np.array([3, 4])
    counter.observe(first)
    taken = counter.take_range(0, 10)
    counter.observe(second)
    assert taken.row_ids.tolist() == [3]
    counter.put_back(taken)
    assert counter.counts().tolist() == [0, 0, 0, 3, 1, 0, 0, 0, 0, 0]


def test_memory_is_given_back(emulated):
    before = live_bytes(emulated)
    counter = emulated.access_counter("t", 100_000)
    counter.observe(np.arange(1000))
    taken = counter.take_range(0, 100_000)
    counter.put_back(taken)
    counter.select(0, 100_000, 10)
    counter.counts()
    assert live_bytes(emulated) - before <= 400_000 + 8  # the fault flag, and the last cut
    del counter, taken
    assert live_bytes(emulated) == before


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaHostAlloc", "cudaMemsetAsync"])
def test_no_counter_is_made_where_a_call_fails(emulated, call):
    before = live_bytes(emulated)
    emulated.native.emulator.fail_call(call, 1)
    with pytest.raises(CudaError, match=r"out of memory\) at cuda"):
        emulated.access_counter("t", 1000)
    assert live_bytes(emulated) == before


@pytest.mark.parametrize("nth", range(1, 8))
@pytest.mark.parametrize(
    "call", ["cudaMallocFromPoolAsync", "cudaLaunchKernelEx", "cudaMemcpyAsync"]
)
def test_a_failing_call_leaves_the_counts_as_they_are(emulated, call, nth):
    counter = emulated.access_counter("t", 1000)
    counter.observe(np.arange(100))
    emulated.native.emulator.fail_call(call, nth)
    with contextlib.suppress(CudaError):  # not every call is made so often
        counter.select(0, 1000, 50)
    emulated.native.emulator.fail_call("", 0)
    assert counter.select(0, 1000, 50).tolist() == list(range(50))


@pytest.mark.parametrize("call", ["cuCtxPushCurrent", "cudaEventSynchronize", "cudaMemcpyAsync"])
def test_an_error_while_many_ids_go_to_the_host_is_told_and_ends_nothing(emulated, call):
    """They go on a thread of the library, whose every call may fail."""
    run_python(f"""
import contextlib
import numpy as np
from cpr_ext import _emulated as native
from cpr_ext.errors import CudaError
native.emulator.set_num_devices(3)
counter = native.DeviceAccessCounter(name="t", num_rows=20_000, device=2)  # nobody's current one
lookups = np.arange(10_000)
counter.observe(lookups)
for nth in 10 * list(range(1, 12)):  # which thread makes it is chance
    native.emulator.fail_call("{call}", nth, 719)
    with contextlib.suppress(CudaError):  # not every call is made so often
        assert len(counter.begin_select(0, 20_000, 5000).read()) == 5000
    native.emulator.fail_call("", 0)
assert counter.select(0, 20_000, 5000).tolist() == list(range(5000))
""")


def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(UsageError, match="device is 99; there are"):
        device.native.DeviceAccessCounter(name="t", num_rows=5, device=99)


def test_more_rows_than_half_a_register_pair_counts_are_refused(device):
    with pytest.raises(UsageError, match=r"'t' has 4294967295 rows; .* at most 4294967294"):
        device.native.DeviceAccessCounter(name="t", num_rows=2**32 - 1, device=0)


def test_rows_are_chosen_while_the_caller_goes_on(emulated):
    counter = emulated.access_counter("t", 1000)
    counter.observe(np.repeat(np.arange(100), 3))
    emulated.native.emulator.set_lazy(True)
    pending = counter.begin_select(0, 1000, 200)
    later = np.repeat(np.arange(500, 600), 9)
    counter.observe(later)  # submitted later: not among those chosen
    asked = 0
    while not pending.is_ready():
        asked += 1
    assert asked > 3
    assert pending.read().tolist() == list(range(100))
    assert counter.select(0, 1000, 100).tolist() == list(range(500, 600))


def counter_of(backend, counts):
    counter = backend.access_counter("t", len(counts))
    counter.observe(np.repeat(np.arange(len(counts)), counts))
    return counter


COUNTS = {
    "small": lambda random: random.poisson(1, 20_000),
    "the rows of nine warps": lambda random: random.poisson(1, 9 * 32 * 4),
    "beyond the bins": lambda random: random.integers(2040, 2060, 60) * (random.random(60) < 0.8),
}


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("begin", [0, 1, 30])
def test_the_same_rows_are_chosen_whatever_was_before(device, kind, begin):
    """A selection guesses its lowest count from the last one: here wrongly, and rightly."""
    counts = COUNTS[kind](np.random.default_rng(0))
    counter = counter_of(device, counts)
    rest = counts[begin:].astype(np.uint32)
    ranking = reference.Ranking(rest)
    for share in (0.02, 0.3, 0.3, 0.99, 1, 1, 0.3, 0, 0.3):
        k = int(share * len(rest))
        expected = ranking.top(k) + begin
        assert counter.select(begin, len(counts), k).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", COUNTS)
def test_counts_are_read_once_if_the_lowest_chosen_one_is_that_of_the_last_time(emulated, kind):
    counts = COUNTS[kind](np.random.default_rng(0))
    counter = counter_of(emulated, counts)
    wide_loads = emulated.native.emulator.wide_loads

    def loads_of(k):
        before = wide_loads()
        counter.select(0, len(counts), k)
        return wide_loads() - before

    for k in (len(counts) // 5, len(counts)):
        wrong, right = loads_of(k), loads_of(k)
        assert right == len(counts) // 4
        # For the guess, for each pass of the histogram, and for the cut that it found.
        assert wrong in (3 * right, 6 * right)


def test_rows_that_the_device_chose_are_taken_without_their_ids(emulated):
    counter = emulated.access_counter("t", 1000)
    counter.observe(np.arange(300))
    chosen = counter.begin_select(0, 1000, 200)
    row_ids = chosen.read()
    emulated.native.emulator.calls()
    taken = counter.take_chosen(row_ids[50:], chosen=chosen, first=50)
    assert "cudaMemcpyAsync" not in emulated.native.emulator.calls()
    del chosen  # what was taken has them, too
    assert counter.dirty_rows().tolist() == [*range(50), *range(200, 300)]
    assert taken.row_ids.tolist() == list(range(50, 200))
    counter.put_back(taken)
    assert counter.num_dirty() == 300


def test_rows_that_were_not_chosen_here_are_not_taken(emulated):
    counter, other = (emulated.access_counter(name, 1000) for name in "tu")
    counter.observe(np.arange(10))
    chosen = counter.begin_select(0, 1000, 5)
    ids = np.arange(5)
    with pytest.raises(UsageError, match=r"'t': rows 0 to 5 are to be taken of 0 chosen ones"):
        counter.take_chosen(ids, chosen=chosen, first=0)
    chosen.read()
    with pytest.raises(UsageError, match=r"'t': rows 1 to 6 are to be taken of 5 chosen ones"):
        counter.take_chosen(ids, chosen=chosen, first=1)
    with pytest.raises(UsageError, match=r"'t': rows -1 to 4 are to be taken of 5 chosen ones"):
        counter.take_chosen(ids, chosen=chosen, first=-1)
    with pytest.raises(UsageError, match=r"'u': .* chosen for another table"):
        other.take_chosen(ids, chosen=chosen, first=0)
    assert counter.num_dirty() == 10


def test_rows_chosen_later_are_read_at_once_if_asked_for(device):
    counter = device.access_counter("t", 1000)
    counter.observe(np.array([7, 7, 9]))
    assert counter.begin_select(0, 1000, 1).read().tolist() == [7]
    assert counter.begin_select(8, 1000, 0).read().tolist() == []


def test_a_tracker_on_the_cpu_has_nothing_to_wait_for():
    counter = backends.find("cpu").access_counter("t", 10)
    assert counter.begin_select(0, 10, 5) is None
