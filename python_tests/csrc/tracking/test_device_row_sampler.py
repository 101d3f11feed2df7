"""csrc/tracking/cuda/row_sampler.h: what differs from RowSampler, which test_any_tracker.py holds
both to while nothing is evicted."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.errors import CudaError, UsageError
from python_tests.csrc import backends, reference
from python_tests.csrc.backends import live_bytes
from python_tests.examples import examples

EMPTY = 2**64 - 1


def sampled_rows(sampler):
    return sampler.select(0, sampler.num_rows, sampler.num_sampled).tolist()


def due_lookups(first, size, period, seed=0):
    """Positions, among lookups of numbers from ``first`` on, of those that are sampled."""
    model = reference.RowSampler(1, 1, period, seed)
    return [i for i in range(size) if model.is_sampled(first + i)]


class Watched:
    """A sampler on the emulated device, and its slots as they lie in the memory there."""

    def __init__(self, emulated, num_rows, capacity, **options):
        before = set(emulated.native.emulator.allocations())
        self.sampler = emulated.row_sampler("t", num_rows, capacity=capacity, **options)
        memory = emulated.native.emulator.allocations()
        [address] = [at for at in set(memory) - before if memory[at] == 8 * capacity]
        self._slots = (ctypes.c_uint64 * capacity).from_address(address)

    def check_invariant(self):
        """A row lies in a slot exactly if its bit is set, and in one slot only."""
        held = [row for row in self._slots if row != EMPTY]
        assert sorted(held) == sampled_rows(self.sampler)
        assert len(held) == self.sampler.num_sampled
        assert set(held) <= set(self.sampler.dirty_rows().tolist())


# What happens, how many rows of how many take part in it, and which.
events = st.lists(
    st.tuples(
        st.sampled_from(["look", "look", "take", "range", "put back"]),
        st.integers(0, 600),
        st.sampled_from([3, 40, 300]),
        st.integers(0, 1000),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.emulated
@examples(60)
@given(
    events=events,
    capacity=st.sampled_from([1, 2, 7, 61, 250]),
    period=st.integers(1, 4),
    seed=st.integers(0, 2**64 - 1),
    order=st.integers(1, 1000),
)
def test_in_any_order_of_threads_the_sample_is_one_of_some_order_of_lookups(
    events, capacity, period, seed, order
):
    emulated = backends.find("emulated")
    emulated.native.emulator.shuffle_threads(order)
    watched = Watched(emulated, 300, capacity, period=period, seed=seed)
    sampler = watched.sampler
    num_observed = 0
    due: set[int] = set()  # rows that a lookup since they were taken may have sampled
    dirty: set[int] = set()
    undo = []
    for event, num_rows, among, drawn in events:
        rows = np.random.default_rng(drawn).integers(0, among, num_rows)
        if event == "look":
            came = set(rows[due_lookups(num_observed, len(rows), period, seed)].tolist())
            num_observed += len(rows)
            before = set(sampled_rows(sampler))
            sampler.observe(rows)
            due |= came
            dirty |= set(rows.tolist())
            assert sampler.num_sampled == min(capacity, len(before | came))
        elif event in ("take", "range"):
            chosen = np.unique(rows[:20]) if event == "take" else np.arange(among // 2)
            is_range = event == "range"
            taken = sampler.take_range(0, among // 2) if is_range else sampler.take(chosen)
            left = set(chosen.tolist())
            undo.append((taken, due & left, dirty & left))
            due -= left
            dirty -= left
        elif undo:
            taken, were_due, were_dirty = undo.pop()
            assert set(taken.row_ids.tolist()) == were_dirty
            before = set(sampled_rows(sampler))
            sampler.put_back(taken)
            due |= were_due
            dirty |= were_dirty
            assert before <= set(sampled_rows(sampler)) or sampler.num_sampled == capacity
        assert set(sampled_rows(sampler)) <= due
        assert sampler.dirty_rows().tolist() == sorted(dirty)
    sampler.observe(np.array([5]))  # slots of rows that were taken are free by now
    watched.check_invariant()


@pytest.mark.emulated
@examples(30)
@given(rows=st.lists(st.integers(0, 40), min_size=60, max_size=150), seed=st.integers(0, 99))
def test_one_lookup_at_a_time_gives_the_references_sample_also_where_it_evicts(rows, seed):
    options = {"capacity": 9, "period": 2, "seed": seed}
    sampler = backends.find("emulated").row_sampler("t", 41, **options)
    model = reference.RowSampler(41, **options)
    for row in rows:
        sampler.observe(np.array([row]))
        model.observe([row])
    assert sampled_rows(sampler) == sorted(model.sample)
    assert sampler.select(3, 38, 4).tolist() == model.select(3, 38, 4)


@pytest.mark.parametrize("period", [1, 2, 7])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_while_there_is_room_the_sample_is_the_references(device, period, dtype):
    options = {"capacity": 5000, "period": period, "seed": 5}
    sampler = device.row_sampler("t", 5000, **options)
    model = reference.RowSampler(5000, **options)
    random = np.random.default_rng(period)
    for num_lookups in (0, 1, 1023, 2500):
        indices = random.integers(0, 5000, num_lookups).astype(dtype)
        sampler.observe(indices)
        model.observe(indices.tolist())
        assert sampled_rows(sampler) == sorted(model.sample)
        assert sampler.select(100, 4900, 50).tolist() == model.select(100, 4900, 50)
        assert sampler.num_dirty() == len(model.dirty)


def test_every_row_has_the_same_chance_to_stay(device):
    """1000 rows come once each into a sample of 100, 300 times over: each stays about 30 times."""
    stayed = np.zeros(1000)
    for seed in range(300):
        sampler = device.row_sampler("t", 1000, capacity=100, period=1, seed=seed)
        for part in np.random.default_rng(seed).permutation(1000).reshape(4, 250):
            sampler.observe(part)
        stayed[sampled_rows(sampler)] += 1
    assert stayed.sum() == 300 * 100
    assert 8 < stayed.min() <= stayed.max() < 60


def test_rows_in_demand_are_found_in_the_sample(device):
    random = np.random.default_rng(0)
    sampler = device.row_sampler("t", 100_000, capacity=100, period=2)
    hot = np.arange(50) * 1000 + 7
    for _ in range(20):
        batch = np.concatenate([np.repeat(hot, 40), random.integers(0, 100_000, 200)])
        sampler.observe(random.permutation(batch))
    # A lookup of a row that is just being evicted counts as made before: fewer than on the CPU.
    assert len(set(sampled_rows(sampler)) & set(hot.tolist())) > 25, "by chance there were 3"


@pytest.mark.parametrize("num_tables", [1, 2, 26, 64, 65, 130])
def test_a_batch_of_many_tables_is_sampled_table_by_table(device, num_tables):
    random = np.random.default_rng(num_tables)
    samplers = [
        device.row_sampler(f"t{i}", 50 + i, capacity=50 + i, period=3) for i in range(num_tables)
    ]
    batch = [random.integers(0, 50, random.integers(0, 100)) for _ in samplers]
    trackers = [sampler.tracker for sampler in samplers]
    for _ in range(2):
        device.native.count_lookups(trackers, [device.put(indices) for indices in batch])
    for sampler, indices in zip(samplers, batch, strict=True):
        twice = np.concatenate([indices, indices])
        due = due_lookups(0, len(twice), 3)
        assert sampled_rows(sampler) == np.unique(twice[due]).tolist()
        assert sampler.dirty_rows().tolist() == np.unique(indices).tolist()


def test_lookups_are_numbered_on_where_a_table_occurs_twice_in_a_batch(device):
    sampler = device.row_sampler("t", 100, capacity=100, period=4)
    lookups = [device.put(np.arange(i, i + 5)) for i in (0, 5, 10)]
    device.native.count_lookups([sampler.tracker] * 3, lookups)
    assert sampled_rows(sampler) == due_lookups(0, 15, 4)


def test_a_batch_of_26_tables_is_two_launches_and_allocates_nothing(emulated):
    samplers = [emulated.row_sampler(f"t{i}", 1000, capacity=125).tracker for i in range(26)]
    batch = [np.arange(100) for _ in samplers]
    emulated.native.emulator.calls()
    emulated.native.count_lookups(samplers, batch)
    assert emulated.native.emulator.calls() == {"cudaLaunchKernelEx": 2}


def test_trackers_of_every_kind_share_a_batch(emulated):
    native = emulated.native
    sampler = emulated.row_sampler("a", 10, capacity=10, period=1).tracker
    counter = emulated.access_counter("b", 10).tracker
    on_host = native.RowSampler(name="c", num_rows=10, capacity=10, period=1)
    rows = np.array([2, 2, 7])
    native.count_lookups([counter, sampler, on_host, counter], [rows, rows, rows, np.array([1])])
    assert counter.counts().tolist() == [0, 1, 2, 0, 0, 0, 0, 1, 0, 0]
    assert sampled_rows(sampler) == sampled_rows(on_host) == [2, 7]


@pytest.mark.parametrize("capacity", [100, 66_000])  # more than the largest grid has threads
def test_slots_of_rows_that_were_taken_are_used_again_before_any_row_is_evicted(emulated, capacity):
    watched = Watched(emulated, 2 * capacity, capacity, period=1)
    sampler, half = watched.sampler, capacity // 2
    sampler.observe(np.arange(capacity))
    sampler.take(np.arange(0, capacity, 2))
    assert sampler.num_sampled == half
    sampler.observe(np.arange(capacity, capacity + half))
    assert sampled_rows(sampler) == [*range(1, capacity, 2), *range(capacity, capacity + half)]
    watched.check_invariant()


def test_rows_put_back_are_in_the_sample_again_and_dirty(device):
    sampler = device.row_sampler("t", 1000, capacity=100, period=2)
    sampler.observe(np.arange(60))
    sampled = sampled_rows(sampler)
    taken = sampler.take_range(0, 1000)
    sampler.observe(np.arange(900, 910))
    assert taken.row_ids.tolist() == list(range(60))
    sampler.put_back(taken)
    came = [900 + due for due in due_lookups(60, 10, 2)]
    assert sampled_rows(sampler) == [*sampled, *came]
    assert sampler.dirty_rows().tolist() == [*range(60), *range(900, 910)]


def test_rows_taken_and_chosen_are_those_of_the_moment(emulated):
    sampler = emulated.row_sampler("t", 1000, capacity=10, period=1)
    emulated.native.emulator.set_lazy(True)
    first, second = np.array([3, 4]), np.array([3, 5])
    sampler.observe(first)
    pending = sampler.begin_select(0, 1000, 10)
    taken = sampler.take_range(0, 1000)
    sampler.observe(second)
    asked = 0
    while not pending.is_ready():
        asked += 1
    assert asked > 3
    assert pending.read().tolist() == taken.row_ids.tolist() == [3, 4]
    assert sampled_rows(sampler) == [3, 5]


def test_observing_choosing_and_taking_wait_for_nothing(emulated):
    sampler = emulated.row_sampler("t", 1000, capacity=100)
    emulated.native.emulator.set_lazy(True)
    emulated.native.emulator.calls()
    lookups, row_ids = np.arange(500), np.arange(10, 20)
    sampler.observe(lookups)
    pending = sampler.begin_select(0, 1000, 50)
    taken = [sampler.take(row_ids), sampler.take_range(400, 600)]
    calls = emulated.native.emulator.calls()
    assert "cudaStreamSynchronize" not in calls
    assert calls["cudaEventSynchronize"] == 1  # that of an upload's block, long free
    assert len(pending.read()) == 50
    assert [t.num_rows for t in taken] == [10, 100]


@pytest.mark.parametrize(
    "call", ["cudaMalloc", "cudaHostAlloc", "cudaMemsetAsync", "cudaLaunchKernelEx"]
)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_no_sampler_is_made_where_a_call_fails(emulated, call, nth):
    before = live_bytes(emulated)
    emulated.native.emulator.calls()
    emulated.row_sampler("t", 1000, capacity=10)
    if nth > emulated.native.emulator.calls()[call]:
        return
    emulated.native.emulator.fail_call(call, nth)
    with pytest.raises(CudaError, match=r"out of memory\) at "):
        emulated.row_sampler("t", 1000, capacity=10)
    assert live_bytes(emulated) == before


@pytest.mark.parametrize("nth", range(1, 12))
@pytest.mark.parametrize(
    "call", ["cudaMallocFromPoolAsync", "cudaLaunchKernelEx", "cudaMemcpyAsync"]
)
def test_a_call_that_fails_leaves_the_sample_as_it_was(emulated, call, nth):
    watched = Watched(emulated, 1000, 50, period=1, seed=3)
    sampler = watched.sampler
    sampler.observe(np.arange(200))
    sampled = sampled_rows(sampler)
    for attempt in (
        lambda: sampler.select(0, 1000, 20),
        lambda: sampler.take(np.arange(100)),
        lambda: sampler.take_range(0, 100),
    ):
        emulated.native.emulator.fail_call(call, nth)
        try:
            result = attempt()
        except CudaError:
            pass
        else:  # not every call is made so often
            if not isinstance(result, np.ndarray):
                emulated.native.emulator.fail_call("", 0)
                sampler.put_back(result)
        emulated.native.emulator.fail_call("", 0)
        assert sampled_rows(sampler) == sampled
        assert sampler.num_dirty() == 200
    watched.check_invariant()


@pytest.mark.parametrize(
    "call", ["cudaMallocFromPoolAsync", "cudaLaunchKernelEx", "cudaMemcpyAsync"]
)
def test_what_could_not_be_put_back_can_be_once_there_is_room(emulated, call):
    watched = Watched(emulated, 1000, 50, period=1, seed=3)
    sampler = watched.sampler
    sampler.observe(np.arange(40))
    taken = sampler.take_range(0, 1000)
    assert taken.num_rows == 40
    emulated.native.trim_memory(0)  # or it has room
    emulated.native.emulator.fail_call(call, 1)
    with pytest.raises(CudaError):
        sampler.put_back(taken)
    sampler.put_back(taken)
    assert sampled_rows(sampler) == list(range(40))
    watched.check_invariant()


def test_lookups_of_a_failed_launch_are_lost_and_nothing_else(emulated):
    sampler = emulated.row_sampler("t", 100, capacity=10, period=1)
    for nth in (1, 2):
        emulated.native.emulator.fail_call("cudaLaunchKernelEx", nth)
        with pytest.raises(CudaError):
            sampler.observe(np.array([1, 2]))
    sampler.observe(np.array([7]))
    assert sampled_rows(sampler) == sampler.dirty_rows().tolist() == [7]


def test_memory_is_given_back(emulated):
    before = live_bytes(emulated)
    sampler = emulated.row_sampler("t", 100_000, capacity=1000)
    sampler.observe(np.arange(3000))
    sampler.put_back(sampler.take_range(0, 100_000))
    sampler.select(0, 100_000, 10)
    assert sampler.memory_bytes() <= live_bytes(emulated) - before
    assert live_bytes(emulated) - before < 2 * 100_000 // 8 + 12 * 1000 + 200
    del sampler
    assert live_bytes(emulated) == before


def test_what_a_sample_cannot_be_is_refused_by_value(device):
    with pytest.raises(UsageError, match="'t': capacity is 0"):
        device.row_sampler("t", 10, capacity=0)
    with pytest.raises(UsageError, match="'t': period is 0"):
        device.row_sampler("t", 10, capacity=1, period=0)
    with pytest.raises(UsageError, match="capacity is 4294967296; a sample on a device"):
        device.row_sampler("t", 2**33, capacity=2**32)
    with pytest.raises(UsageError, match="device is 99; there are"):
        device.native.DeviceRowSampler(name="t", num_rows=5, capacity=1, device=99)
    assert device.row_sampler("t", 7, capacity=100).capacity == 7


def test_the_lookups_of_a_bad_index_are_numbered_too(device):
    sampler = device.row_sampler("t", 100, capacity=100, period=2)
    lookups = np.array([5, 100, 6, 7, 100, 100, 8, 9, 10, 11])
    sampler.observe(lookups)
    due = lookups[due_lookups(0, len(lookups), 2)]
    assert sampled_rows(sampler) == due[due < 100].tolist()
    assert sampler.dirty_rows().tolist() == list(range(5, 12))
