"""csrc/tracking/row_sampler.h, cuda/row_sampler.h: which lookups are sampled, which rows stay.

test_any_tracker.py holds both to the reference's life while nothing is evicted.
"""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.errors import CudaError, UsageError
from python_tests.csrc import backends, reference
from python_tests.examples import examples

EMPTY = 2**64 - 1


def sampled_rows(sampler):
    return sampler.select(0, sampler.num_rows, sampler.num_sampled).tolist()


def sampled_numbers(backend, num_lookups, batch_size, period, seed=0):
    """Which of so many lookups are sampled: each looks up a row of its own."""
    options = {"capacity": num_lookups, "period": period, "seed": seed}
    sampler = backend.row_sampler("t", num_lookups, **options)
    for first in range(0, num_lookups, batch_size):
        sampler.observe(np.arange(first, min(num_lookups, first + batch_size)))
    assert sampler.num_dirty() == num_lookups
    return np.array(sampled_rows(sampler), dtype=np.int64)


@pytest.mark.parametrize("period", [1, 2, 3, 7, 64, 1000])
def test_of_every_period_of_lookups_one_is_sampled_however_they_come_in_batches(backend, period):
    num_lookups = 30 * period if period < 100 else 3 * period
    numbers = sampled_numbers(backend, num_lookups, 7 if num_lookups < 500 else 77, period)
    assert (numbers // period).tolist() == list(range(num_lookups // period))
    for batch_size in (1 if num_lookups < 500 else 501, period, num_lookups):
        again = sampled_numbers(backend, num_lookups, batch_size, period)
        assert again.tolist() == numbers.tolist()
    assert len(sampled_numbers(backend, 1000, 300, 2**63 - 1)) <= 1


@pytest.mark.parametrize("period", [2, 3, 8])
@pytest.mark.parametrize("bag", [2, 3, 8, 64])
def test_every_column_of_a_bag_is_sampled_at_its_share(backend, period, bag):
    """Chi-squared over the columns; by a place for good, some would never be sampled."""
    share = 640  # lookups sampled of a column, in 20 independent draws or more
    numbers = sampled_numbers(backend, share * period * bag, 100 * bag, period, seed=period)
    columns = np.bincount(numbers % bag, minlength=bag)
    assert columns.sum() == share * bag
    statistic = ((columns - share) ** 2 / share).sum() / 32  # the same draw serves 32 lookups
    assert statistic < bag - 1 + 4 * np.sqrt(2 * bag), columns


def test_the_places_drawn_are_independent_of_each_other():
    places = (sampled_numbers(backends.find("cpu"), 256_000, 256_000, 2) % 2).reshape(-1, 32)
    assert (places == places[:, :1]).all()
    places = places[:, 0]
    for lag in (1, 2, 3, 4, 8, 16):
        pairs = np.bincount(2 * places[lag:] + places[:-lag], minlength=4)
        assert (abs(pairs - 1000) < 5 * np.sqrt(750)).all(), (lag, pairs)


@examples(40)
@given(
    num_rows=st.sampled_from([1, 64, 1000, 70_000]),
    share=st.sampled_from([0.001, 0.125, 1.0]),
    period=st.sampled_from([1, 2, 7, 2048]),
    seed=st.integers(0, 2**64 - 1),
    dtype=st.sampled_from([np.int32, np.int64]),
)
def test_the_sample_is_the_references(num_rows, share, period, seed, dtype):
    options = {"capacity": max(1, int(share * num_rows)), "period": period, "seed": seed}
    options["capacity"] = min(options["capacity"], 200)  # the reference searches a list
    native = backends.find("cpu").row_sampler("t", num_rows, **options)
    model = reference.RowSampler(num_rows, **options)
    random = np.random.default_rng(seed)
    for _ in range(3):
        indices = random.integers(0, num_rows, random.integers(0, 1000)).astype(dtype)
        native.observe(indices)
        model.observe(indices.tolist())
        assert sampled_rows(native) == sorted(model.sample)
        for k in (len(model.sample) // 2, len(model.sample), 2 * len(model.sample), num_rows):
            assert native.select(0, num_rows, k).tolist() == model.select(0, num_rows, k)


@pytest.mark.parametrize("num_dirty", [1, 1000, 70_000])
def test_what_the_sample_leaves_of_the_budget_is_filled_with_other_dirty_rows(backend, num_dirty):
    sampler = backend.row_sampler("t", 70_000, capacity=50, period=2**40)
    random = np.random.default_rng(num_dirty)
    rows = np.sort(random.permutation(70_000)[:num_dirty])
    sampler.observe(rows)
    model = reference.RowSampler(70_000, 50, 2**40, 0)
    model.observe(rows.tolist())
    for k in (1, 39, 41, 500, num_dirty - 1, num_dirty, 70_000):
        chosen = sampler.select(0, 70_000, k).tolist()
        assert len(chosen) == min(k, num_dirty)
        assert chosen == model.select(0, 70_000, k)
    assert sampler.select(100, 50_000, 70_000).tolist() == model.dirty_rows(100, 50_000)


@pytest.mark.parametrize("period", [1, 2**40], ids=["of the sample", "beside it"])
def test_no_row_is_favoured_where_the_budget_is_short(backend, period):
    """200 dirty rows, 20 chosen, 500 times: each row comes out about 50 times."""
    sampler = backend.row_sampler("t", 200, capacity=200, period=period)
    chosen = np.zeros(200)
    for _ in range(500):
        sampler.observe(np.arange(200))
        chosen[sampler.select(0, 200, 20)] += 1
    assert chosen.sum() == 500 * 20
    assert 20 < chosen.min() <= chosen.max() < 85


def test_every_row_has_the_same_chance_to_stay(backend):
    """1000 rows come once each into a sample of 100, 300 times over: each stays about 30 times."""
    stayed = np.zeros(1000)
    for seed in range(300):
        sampler = backend.row_sampler("t", 1000, capacity=100, period=1, seed=seed)
        for part in np.random.default_rng(seed).permutation(1000).reshape(4, 250):
            sampler.observe(part)
        stayed[sampled_rows(sampler)] += 1
    assert stayed.sum() == 300 * 100
    assert 8 < stayed.min() <= stayed.max() < 60


def test_what_a_sample_cannot_be_is_refused_by_value(backend):
    with pytest.raises(UsageError, match="'t': capacity is 0"):
        backend.row_sampler("t", 10, capacity=0)
    with pytest.raises(UsageError, match="'t': period is 0"):
        backend.row_sampler("t", 10, capacity=1, period=0)
    if backend.name != "cpu":
        with pytest.raises(UsageError, match="capacity is 4294967296; a sample on a device"):
            backend.row_sampler("t", 2**33, capacity=2**32)
    assert backend.row_sampler("t", 7, capacity=100).capacity == 7


# --- on a device ---


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


@pytest.mark.parametrize("num_tables", [2, 64, 65, 130])
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


def test_lookups_of_a_bad_index_and_of_a_table_twice_in_a_batch_are_numbered_too(device):
    sampler = device.row_sampler("t", 100, capacity=100, period=2)
    parts = [[5, 100, 6, 7], [100, 100, 8, 9, 10], [11]]
    batch = [device.put(np.array(part)) for part in parts]
    device.native.count_lookups([sampler.tracker] * 3, batch)
    lookups = np.concatenate(parts)
    due = lookups[due_lookups(0, len(lookups), 2)]
    assert sampled_rows(sampler) == due[due < 100].tolist()
    assert sampler.dirty_rows().tolist() == list(range(5, 12))
