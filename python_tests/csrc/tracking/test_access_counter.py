"""csrc/tracking/access_counter.h and cuda/access_counter.h: counts, their limit, who is chosen."""

import ctypes
import gc

import numpy as np
import pytest

from cpr_ext import _C
from cpr_ext.errors import RowIndexError, UsageError
from python_tests.csrc import backends, reference
from python_tests.faults.memory_meter import MemoryMeter
from python_tests.helpers import run_python

HIGHEST_COUNT = 2**32 - 1
NUM_ROWS = 1237  # no other memory has this size


def test_counts_are_a_view_that_nobody_can_write_and_that_keeps_its_counter(backend):
    counter = backend.access_counter("t", 4)
    counts = counter.counts()
    counter.observe(np.array([2, 2]))
    on_cpu = backend.name == "cpu"
    assert counts.tolist() == ([0, 0, 2, 0] if on_cpu else [0, 0, 0, 0])
    if on_cpu:
        with pytest.raises(ValueError, match="read-only"):
            counts[0] = 1
    counts = counter.counts()
    del counter
    gc.collect()
    assert counts.tolist() == [0, 0, 2, 0]


def write_count(backend, counter, row_id, count):
    """Four thousand million lookups would take too long, so the test writes the memory itself."""
    if backend.name == "cpu":
        counter.observe(np.array([row_id]))  # says where counts are
        address = counter.counts().ctypes.data
    else:
        memory = backend.native.emulator.allocations()
        [address] = [where for where, size in memory.items() if size == 4 * NUM_ROWS]
    ctypes.c_uint32.from_address(address + 4 * row_id).value = count


@pytest.fixture(params=["cpu", "emulated"])
def on_host(request):
    """A backend whose memory the test can write."""
    cpu = request.param == "cpu"
    return backends.find("cpu") if cpu else request.getfixturevalue("emulated")


@pytest.mark.parametrize("below", [0, 1, 5, 40])
@pytest.mark.parametrize("num_lookups", [1, 4, 100])
def test_a_count_stops_at_its_limit_also_where_it_is_put_back(on_host, below, num_lookups):
    counter, lookups = on_host.access_counter("t", NUM_ROWS), np.full(num_lookups, 3)
    write_count(on_host, counter, 3, HIGHEST_COUNT - below)
    counter.put_back(counter.take_range(0, NUM_ROWS))  # it learns, or forgets, how high counts are
    taken = counter.take_range(0, NUM_ROWS)
    counter.observe(lookups)
    counter.put_back(taken)
    expected = min(HIGHEST_COUNT, HIGHEST_COUNT - below + num_lookups)
    assert counter.counts()[3] == expected
    counter.observe(lookups)
    assert counter.counts()[3] == min(HIGHEST_COUNT, expected + num_lookups)
    assert counter.dirty_rows().tolist() == [3]
    assert counter.counts().sum() == counter.counts()[3]


def test_a_count_that_graphs_may_have_raised_stops_at_its_limit(emulated):
    counter = emulated.access_counter("t", NUM_ROWS)
    emulated.native.emulator.set_capturing(True)
    counter.observe(np.array([3]))
    emulated.native.emulator.set_capturing(False)
    counter.take_range(0, NUM_ROWS)
    write_count(emulated, counter, 3, HIGHEST_COUNT - 1)
    emulated.native.emulator.replay_graph()
    counter.observe(np.array([3]))
    assert counter.counts()[3] == HIGHEST_COUNT


@pytest.mark.parametrize(
    ("kind", "num_rows"), [(_C.AccessCounter, 50_000_000), (_C.DirtyRows, 1_600_000_000)]
)
def test_rows_that_are_never_looked_up_take_no_memory(kind, num_rows):
    """So a worker that replaces one which was lost starts as fast with large tables."""
    meter = MemoryMeter()
    tracker = kind(name="t", num_rows=num_rows)
    tracker.observe(np.array([0, num_rows // 2, num_rows - 1]))
    assert tracker.memory_bytes() - 200_000_000 in range(1_000_000)
    assert meter.grown_bytes() < 20e6
    assert tracker.num_dirty() == 3


# --- on a device ---


@pytest.mark.parametrize("bad", [-1, 100, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**32])
def test_of_bad_indices_among_as_many_good_ones_as_a_block_takes_one_is_told_once(device, bad):
    """At the next batch, which is counted."""
    indices = np.full(4096, 5)
    indices[1700] = bad
    counter, good = device.access_counter("t", 100), [device.put(np.array([7]))]
    for lookups, told in ((indices, "1700"), (np.array([bad] * 70 + [1]), "[0-9]+")):
        counter.observe(lookups)
        assert counter.num_dirty() > 0  # the device has passed
        words = f"'t': index {bad} at position {told} of an earlier .* 0 to 99"
        with pytest.raises(RowIndexError, match=words):
            device.native.count_lookups([counter.tracker], good)
        device.native.count_lookups([counter.tracker], good)
    assert counter.counts()[[1, 5, 7]].tolist() == [1, 4095, 4]


def test_dirty_rows_are_counted_in_tables_larger_than_a_launch_has_threads(emulated):
    threads = 2048 * 256
    counter = emulated.access_counter("t", threads + 40)
    row_ids = np.array([0, 7, threads + 7, threads + 39])  # one thread sees two of them
    counter.observe(row_ids)
    assert counter.num_dirty() == 4
    assert counter.dirty_rows().tolist() == row_ids.tolist()


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


COUNTS = {
    "small": lambda random: random.poisson(1, 20_000),
    "the rows of nine warps": lambda random: random.poisson(1, 9 * 32 * 4),
    "beyond the bins": lambda random: random.integers(2040, 2060, 60) * (random.random(60) < 0.8),
}


def counted(backend, kind):
    random = np.random.default_rng(0)
    counts = COUNTS[kind](random)
    counter = backend.access_counter("t", len(counts))
    lookups = np.repeat(np.arange(len(counts), dtype=random.choice([np.int32, np.int64])), counts)
    counter.observe(lookups[: len(lookups) // 2])
    counter.observe(random.permutation(lookups[len(lookups) // 2 :]).reshape(1, -1, 1))
    np.testing.assert_array_equal(counter.counts(), counts)
    return counter, counts


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("begin", [0, 1, 30])
def test_the_same_rows_are_chosen_whatever_was_before(device, kind, begin):
    """A selection guesses its lowest count from the last one: here wrongly, and rightly."""
    counter, counts = counted(device, kind)
    rest = counts[begin:].astype(np.uint32)
    ranking = reference.Ranking(rest)
    for share in (0.02, 0.3, 0.3, 0.99, 1, 1, 0.3, 0, 0.3):
        k = int(share * len(rest))
        expected = ranking.top(k) + begin
        assert counter.select(begin, len(counts), k).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", COUNTS)
def test_counts_are_read_once_if_the_lowest_chosen_one_is_that_of_the_last_time(emulated, kind):
    counter, counts = counted(emulated, kind)
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


def test_rows_that_the_device_chose_are_taken_without_their_ids_and_no_others(emulated):
    counter, other = (emulated.access_counter(name, 1000) for name in "tu")
    counter.observe(np.arange(300))
    chosen, ids = counter.begin_select(0, 1000, 200), np.arange(5)
    for taker, first, words in [
        (counter, 0, "'t': rows 0 to 5 are to be taken of 0 chosen ones"),
        (counter, -1, "'t': rows -1 to 4 are to be taken of 200 chosen ones"),
        (counter, 196, "'t': rows 196 to 201 are to be taken of 200 chosen ones"),
        (other, 0, "'u': .* chosen for another table"),
    ]:
        with pytest.raises(UsageError, match=words):
            taker.take_chosen(ids, chosen=chosen, first=first)
        row_ids = chosen.read()
    assert counter.num_dirty() == 300
    emulated.native.emulator.calls()
    taken = counter.take_chosen(row_ids[50:], chosen=chosen, first=50)
    assert "cudaMemcpyAsync" not in emulated.native.emulator.calls()
    del chosen  # what was taken has them, too
    assert taken.row_ids.tolist() == list(range(50, 200))
