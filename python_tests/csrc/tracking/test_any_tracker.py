"""What holds for every tracker: its life against the reference, batches of several, refusals, and
on a device what fails, waits and is freed."""

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule

from cpr_ext import _C
from cpr_ext.errors import CudaError, RowIndexError, UsageError
from python_tests.csrc import backends, reference
from python_tests.csrc.backends import KINDS, live_bytes
from python_tests.examples import examples

POOLS = [None] + [_C.ThreadPool(num_threads=threads) for threads in range(1, 5)]
SIZES = st.sampled_from([1, 2, 7, 63, 64, 65, 128, 200])


class TrackerLife(RuleBasedStateMachine):
    """Observes, selects, takes and gives back at random; both sides must agree after each step."""

    backend = ""
    taken = Bundle("taken")

    def make(self, found, num_rows, data):
        raise NotImplementedError

    @initialize(num_rows=SIZES, data=st.data())
    def start(self, num_rows, data):
        self.num_rows = num_rows
        self.weight = None
        self.native, self.model = self.make(backends.find(self.backend), num_rows, data)

    def check(self, begin=0, end=None):
        end = self.num_rows if end is None else end
        expected = self.model.dirty_rows(begin, end)
        assert self.native.dirty_rows(begin, end).tolist() == expected
        assert self.native.num_dirty(begin, end) == len(expected)
        assert self.native.is_clean(begin, end) == (not expected)

    def draw_range(self, data):
        begin = data.draw(st.integers(0, self.num_rows))
        return begin, data.draw(st.integers(begin, self.num_rows))

    @rule(data=st.data(), dtype=st.sampled_from(["int32", "int64"]))
    def observe(self, data, dtype):
        indices = data.draw(st.lists(st.integers(0, self.num_rows - 1), max_size=30))
        self.native.observe(np.array(indices, dtype=dtype))
        self.model.observe(indices)
        if self.weight is not None:
            for row_id in set(indices):
                self.weight[row_id] += data.draw(st.integers(-2, 2))
        self.check()

    @rule(data=st.data(), pool=st.sampled_from(POOLS))
    def select(self, data, pool):
        begin, end = self.draw_range(data)
        k = data.draw(st.integers(-1, self.num_rows + 1))
        expected = self.model.select(begin, end, k, self.weight)
        chosen = self.native.select(begin, end, k, weight=self.weight, pool=pool)
        assert chosen.dtype == np.int64
        assert chosen.tolist() == expected
        self.check(begin, end)

    @rule(target=taken, data=st.data())
    def take_range(self, data):
        begin, end = self.draw_range(data)
        native = self.native.take_range(begin, end, weight=self.weight)
        return self.compare_taken(native, self.model.take(range(begin, end), self.weight))

    @rule(target=taken, data=st.data(), pool=st.sampled_from(POOLS))
    def take(self, data, pool):
        row_ids = sorted(data.draw(st.sets(st.integers(0, self.num_rows - 1), max_size=20)))
        native = self.native.take(np.array(row_ids, dtype=np.int64), weight=self.weight, pool=pool)
        return self.compare_taken(native, self.model.take(row_ids, self.weight))

    @rule(target=taken, data=st.data())
    def take_chosen(self, data):
        """As captured rows are taken: those that a device chose, part by part."""
        begin, end = self.draw_range(data)
        k = data.draw(st.integers(0, self.num_rows))
        pending = self.native.begin_select(begin, end, k, weight=self.weight)
        assert (pending is None) == (self.backend == "cpu")  # which has nothing to wait for
        if pending is None:
            return multiple()
        expected = self.model.select(begin, end, k, self.weight)
        row_ids = pending.read()
        assert row_ids.tolist() == expected
        middle = data.draw(st.integers(0, len(expected)))
        pairs = []
        for first, last in ((0, middle), (middle, len(expected))):
            native = self.native.take_chosen(
                row_ids[first:last], chosen=pending, first=first, weight=self.weight
            )
            model = self.model.take(expected[first:last], self.weight)
            pairs.append(self.compare_taken(native, model))
        return multiple(*pairs)

    def compare_taken(self, native, model):
        self.check()  # before the rows taken are looked at: a device hands them out late
        assert native.num_rows == len(model)
        assert native.row_ids.tolist() == [row_id for row_id, _ in model]
        return native, model

    @rule(pair=taken)
    def put_back(self, pair):
        """Also what was given back before, which does nothing."""
        native, model = pair
        self.native.put_back(native)
        assert native.num_rows == 0
        self.model.put_back(model)
        model.clear()
        self.check()


class DirtyRowsLife(TrackerLife):
    def make(self, found, num_rows, data):
        return found.dirty_rows("t", num_rows), reference.DirtyRows(num_rows)


class AccessCounterLife(TrackerLife):
    def make(self, found, num_rows, data):
        return found.access_counter("t", num_rows), reference.AccessCounter(num_rows)

    def check(self, begin=0, end=None):
        super().check(begin, end)
        assert self.native.counts().tolist() == self.model.count


class RowSamplerLife(TrackerLife):
    """On a device with room for every row: where it evicts, the order of lookups is its own."""

    def make(self, found, num_rows, data):
        on_cpu = self.backend == "cpu"
        options = {
            "capacity": data.draw(st.integers(1, num_rows + 1)) if on_cpu else num_rows,
            "period": data.draw(st.integers(1, 5)),
            "seed": data.draw(st.integers(0, 2**64 - 1)),
        }
        native = found.row_sampler("t", num_rows, **options)
        return native, reference.RowSampler(num_rows, **options)

    def check(self, begin=0, end=None):
        super().check(begin, end)
        assert self.native.num_sampled == len(self.model.sample) <= self.native.capacity


class ChangeMeterLife(TrackerLife):
    """Whole numbers as weights: their sums of squares are exact in any order."""

    def make(self, found, num_rows, data):
        dtype = data.draw(st.sampled_from(["float16", "float32", "float64"]))
        embedding_dim = data.draw(st.sampled_from([1, 3, 8, 17]))
        wide = np.zeros((num_rows, embedding_dim + data.draw(st.integers(0, 2))), dtype=dtype)
        self.weight = wide[:, :embedding_dim]
        self.weight += np.arange(num_rows)[:, None] % 5
        return found.change_meter("t", self.weight), reference.ChangeMeter(self.weight)


for life in (DirtyRowsLife, AccessCounterLife, RowSamplerLife, ChangeMeterLife):
    for place, number, mark in (
        ("cpu", 60, None),
        ("emulated", 30, "emulated"),
        ("cuda", 30, "gpu"),
    ):
        case = type(f"{place.title()}{life.__name__}", (life,), {"backend": place}).TestCase
        case.settings = settings(examples(number), stateful_step_count=25)
        globals()[f"Test{place.title()}{life.__name__}"] = case
        if mark is not None:
            getattr(pytest.mark, mark)(case)


WEIGHT = np.zeros((1000, 4), dtype=np.float32)
PLACES = [
    *((place, kind) for place in ("cpu", "emulated") for kind in KINDS),
    *(pytest.param(("cuda", kind), marks=pytest.mark.gpu) for kind in KINDS),
]
of_every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(params=PLACES, ids="-".join)
def place(request):
    return request.param


@pytest.fixture
def make(place):
    return lambda name="users", kind=place[1]: KINDS[kind](backends.find(place[0]), name)


def test_a_new_tracker_tells_its_name_size_and_memory_and_has_no_dirty_row(make):
    tracker, weight = make(), WEIGHT[:100]
    assert (tracker.name, tracker.num_rows) == ("users", 100)
    assert 100 / 8 <= tracker.memory_bytes() <= 100 * 32
    assert "users" in repr(tracker)
    assert "100" in repr(tracker)
    assert tracker.num_dirty() == 0
    assert tracker.dirty_rows().tolist() == []
    assert tracker.select(0, 100, 10, weight=weight).tolist() == []
    assert tracker.take_range(0, 100, weight=weight).num_rows == 0


def test_a_range_or_rows_that_are_not_of_the_table_are_refused(make):
    tracker, weight = make(), WEIGHT[:100]
    tracker.observe(np.array([1, 2, 3]))
    calls = [
        *(tracker.num_dirty, tracker.is_clean, tracker.dirty_rows),
        lambda begin, end: tracker.select(begin, end, 1, weight=weight),
        lambda begin, end: tracker.take_range(begin, end, weight=weight),
    ]
    for bounds, call in itertools.product(((-1, 5), (0, 101), (6, 5)), calls):
        with pytest.raises(UsageError, match=r"users.*range"):
            call(*bounds)
    for row_ids in ([1, 1], [2, 1], [-1, 3], [3, 100]):
        with pytest.raises(UsageError, match="users"):
            tracker.take(np.array(row_ids), weight=weight)
    with pytest.raises(UsageError, match=r"int32.*int64"):
        tracker.take(np.array([1], dtype=np.int32), weight=weight)
    assert tracker.dirty_rows().tolist() == [1, 2, 3]


def test_rows_cannot_be_put_back_into_another_table_or_tracker(place, make):
    tracker = make()
    tracker.observe(np.array([1]))
    taken = tracker.take_range(0, 100, weight=WEIGHT[:100])
    assert "users" in repr(taken)
    for other in [make("items"), *(make(kind=kind) for kind in KINDS if kind != place[1])]:
        with pytest.raises(UsageError, match="users"):
            other.put_back(taken)
    assert taken.num_rows == 1
    tracker.put_back(taken)
    assert tracker.dirty_rows().tolist() == [1]


# --- lookups on the CPU ---


@pytest.mark.usefixtures("every_instruction_set")
@of_every_kind
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_an_index_outside_the_table_is_named_and_nothing_changes(kind, dtype):
    tracker = KINDS[kind](backends.find("cpu"))
    tracker.observe(np.array([5]))
    bits = np.iinfo(dtype)
    more = {-1, 100, 2**31 - 1, -(2**31), 2**32, -(2**32) + 1, bits.min, bits.max}
    for bad in (each for each in more if bits.min <= each <= bits.max):
        indices = np.array([[1, 2], [bad, -7]], dtype=dtype)
        for call in (tracker.check, tracker.observe):
            with pytest.raises(RowIndexError, match=f"'users': index {bad} at position 2 .*100"):
                call(indices)
            assert tracker.dirty_rows().tolist() == [5]


def counters(*sizes):
    return [_C.AccessCounter(name=f"t{i}", num_rows=size) for i, size in enumerate(sizes)]


@examples(60)
@given(
    tables=st.lists(
        st.tuples(
            st.integers(0, 3),  # which tracker: tables repeat
            st.sampled_from([0, 1, 5, 100, 20_000, 300_000]),
            st.sampled_from([np.int32, np.int64]),
        ),
        max_size=8,
    ),
    pool=st.sampled_from(POOLS),
    seed=st.integers(0, 99),
)
def test_a_batch_is_counted_table_by_table(tables, pool, seed):
    random = np.random.default_rng(seed)
    sizes = [1, 64, 5000, 300_000]
    trackers = counters(*sizes)
    expected = [np.zeros(size, dtype=np.int64) for size in sizes]
    indices = []
    for which, num_indices, dtype in tables:
        indices.append(random.integers(0, sizes[which], num_indices).astype(dtype))
        expected[which] += np.bincount(indices[-1], minlength=sizes[which])
    _C.count_lookups([trackers[which] for which, _, _ in tables], indices, pool)
    for tracker, counts in zip(trackers, expected, strict=True):
        np.testing.assert_array_equal(tracker.counts(), counts)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("num_indices", [3, 100_000])
def test_one_bad_index_leaves_every_table_as_it_was(pool, num_indices):
    trackers = counters(10, 20, 30)
    indices = [np.full(num_indices, i) for i in range(3)]
    indices[2][1] = 30
    with pytest.raises(RowIndexError, match="'t2': index 30 at position 1"):
        _C.count_lookups(trackers, indices, pool)
    indices[0][1] = -1
    with pytest.raises(RowIndexError, match="'t0': index -1"):  # the first at fault is named
        _C.count_lookups(trackers, indices, pool)
    assert [tracker.num_dirty() for tracker in trackers] == [0, 0, 0]


REFUSED = [
    (np.array([1.0]), "float64.*int32, int64"),
    (np.array([1], dtype=np.int16), "int16.*astype"),
    (np.array([1], dtype=np.uint64), "uint64"),
    (np.array([1], dtype=">i8"), ">i8"),
    (np.array([True]), "bool"),
    (np.arange(10).reshape(2, 5).T, "contiguous"),
    (np.frombuffer(bytes(17), dtype=np.uint8)[1:].view(np.int64), "contiguous"),
    ([1, 2], "list.*numpy.ndarray"),
    (None, "NoneType"),
]


def test_what_is_no_index_array_no_batch_or_no_table_is_refused_by_name_and_remedy():
    trackers, one = counters(10, 10), np.array([1])
    for wrong, message in REFUSED:
        with pytest.raises(UsageError, match=f"'t1'.*{message}"):
            _C.count_lookups(trackers, [one, wrong])
    with pytest.raises(UsageError, match="2 trackers but 1"):
        _C.count_lookups(trackers, [one])
    with pytest.raises(UsageError, match=r"trackers\[1\] is a str.*AccessCounter"):
        _C.count_lookups([trackers[0], "users"], [one] * 2)
    assert trackers[0].num_dirty() == 0
    for num_rows in (0, -1):
        with pytest.raises(UsageError, match=r"a table without rows.*'empty'"):
            _C.DirtyRows(name="empty", num_rows=num_rows)


# --- on a device ---


@of_every_kind
@pytest.mark.parametrize("num_tables", [1, 26, 64, 65, 130])
def test_a_batch_of_many_tables_on_a_device_is_counted_table_by_table(device, kind, num_tables):
    random = np.random.default_rng(num_tables)
    trackers = [KINDS[kind](device, f"t{i}", 50 + i) for i in range(num_tables)]
    batch = [random.integers(0, 50, random.integers(0, 100)) for _ in trackers]
    device.native.count_lookups([each.tracker for each in trackers], [*map(device.put, batch)])
    for tracker, rows in zip(trackers, batch, strict=True):
        assert tracker.dirty_rows().tolist() == np.unique(rows).tolist()
        if kind == "AccessCounter":
            counts = np.bincount(rows, minlength=tracker.num_rows)
            np.testing.assert_array_equal(tracker.counts(), counts)


@of_every_kind
def test_a_batch_of_26_tables_is_one_launch_and_allocates_nothing(emulated, kind):
    trackers = [KINDS[kind](emulated, f"t{i}", 1000).tracker for i in range(26)]
    batch = [np.arange(100) for _ in trackers]
    emulated.native.emulator.calls()
    emulated.native.count_lookups(trackers, batch)
    launches = 2 if kind == "RowSampler" else 1
    assert emulated.native.emulator.calls() == {"cudaLaunchKernelEx": launches}


def test_trackers_that_are_asked_together_wait_for_the_device_once(emulated):
    on_host, native = backends.Backend("cpu", emulated.native, None), emulated.native
    made = [KINDS[kind](found, "t", 90) for found in (emulated, on_host) for kind in KINDS]
    trackers = [getattr(tracker, "tracker", tracker) for tracker in made]
    rows = [np.arange(10, 20 + number % 4) for number in range(8)]
    native.count_lookups(trackers, rows)
    native.emulator.calls()
    assert native.num_dirty_of(trackers) == [len(each) for each in rows]
    assert native.emulator.calls()["cudaEventSynchronize"] == 1
    assert native.num_dirty_of([]) == []
    assert {tracker.device for tracker in trackers} == {None, 0}
    for dirty in (None, 0, 2, 3, 7):
        begins, ends = [0] * 8, [10] * 8
        if dirty is not None:
            begins[dirty], ends[dirty] = 19, 20
        assert native.are_clean(trackers, begins, ends) == (dirty is None)
    for wrong, words in ((ends[:2], "equally many"), ([91] * 8, "is not inside its rows")):
        with pytest.raises(UsageError, match=words):
            native.are_clean(trackers, begins, wrong)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "DirtyRows"])
def test_choosing_and_taking_wait_for_nothing_and_are_of_their_moment(emulated, kind):
    tracker, emulator = KINDS[kind](emulated, "t", 1000), emulated.native.emulator
    lookups, row_ids, later = np.arange(500), np.arange(10, 20), np.arange(5, 100)
    emulator.set_lazy(True)
    emulator.calls()
    tracker.observe(lookups)
    pending = tracker.begin_select(0, 1000, 500, weight=WEIGHT)
    taken = [tracker.take(row_ids, weight=WEIGHT), tracker.take_range(400, 600, weight=WEIGHT)]
    tracker.observe(later)
    calls = emulator.calls()
    assert "cudaStreamSynchronize" not in calls
    assert calls["cudaEventSynchronize"] == 1  # that of an upload's block, long free
    asked = 0
    while not pending.is_ready():
        asked += 1
    assert asked > 3
    assert pending.read().tolist() == list(range(500))
    assert [each.row_ids.tolist() for each in taken] == [row_ids.tolist(), list(range(400, 500))]
    assert tracker.dirty_rows().tolist() == list(range(400))
    tracker.put_back(taken[1])
    assert tracker.num_dirty() == 500


@of_every_kind
def test_memory_is_as_told_and_given_back(emulated, kind):
    rows = 100_000
    per_row = {"DirtyRows": 1 / 8, "AccessCounter": 4, "RowSampler": 2 / 8 + 6}
    before, weight = live_bytes(emulated), np.zeros((rows, 4), np.float32)
    tracker = KINDS[kind](emulated, "t", rows)
    tracker.observe(np.arange(1000))
    taken = tracker.take_range(0, rows, weight=weight)
    tracker.put_back(taken)
    tracker.select(0, rows, 10, weight=weight)
    assert tracker.memory_bytes() <= live_bytes(emulated) - before < tracker.memory_bytes() + 200
    assert abs(tracker.memory_bytes() - rows * per_row.get(kind, 4 + 1 / 8 + 16)) < 200
    del tracker, taken
    assert live_bytes(emulated) == before


@of_every_kind
@pytest.mark.parametrize(
    "call", ["cudaMalloc", "cudaHostAlloc", "cudaMemsetAsync", "cudaLaunchKernelEx"]
)
def test_no_tracker_is_made_where_a_call_fails(emulated, kind, call):
    before, emulator = live_bytes(emulated), emulated.native.emulator
    emulator.calls()
    KINDS[kind](emulated)
    for nth in range(1, emulator.calls().get(call, 0) + 1):
        emulator.fail_call(call, nth)
        with pytest.raises(CudaError, match=r"out of memory\) at "):
            KINDS[kind](emulated)
        assert live_bytes(emulated) == before


@of_every_kind
@pytest.mark.parametrize("nth", range(1, 14))
@pytest.mark.parametrize(
    "call", ["cudaMallocFromPoolAsync", "cudaLaunchKernelEx", "cudaMemcpyAsync", "cudaMemsetAsync"]
)
def test_a_call_that_fails_leaves_every_row_as_it_was(emulated, kind, call, nth):
    tracker, weight = KINDS[kind](emulated, "t", 1000), WEIGHT.copy()
    tracker.observe(np.arange(200))
    weight[:200] = 1 + np.arange(200)[:, None] % 7

    def chosen():
        if kind == "DirtyRows":
            return tracker.dirty_rows().tolist()
        return tracker.select(0, 1000, 60, weight=weight).tolist()

    before = chosen()
    for attempt in (
        tracker.dirty_rows,
        lambda: tracker.select(0, 1000, 20, weight=weight),
        lambda: tracker.take(np.arange(100), weight=weight),
        lambda: tracker.take_range(0, 100, weight=weight),
    ):
        emulated.native.emulator.fail_call(call, nth)
        result = None
        with contextlib.suppress(CudaError):  # not every call is made so often
            result = attempt()
        emulated.native.emulator.fail_call("", 0)
        if result is not None and not isinstance(result, np.ndarray):
            tracker.put_back(result)
        assert tracker.num_dirty() == 200
        assert chosen() == before


def test_a_device_that_is_not_there_and_more_rows_than_it_counts_are_refused(device):
    weight = device.put(WEIGHT)
    for kind, options in {
        "DirtyRows": {"num_rows": 5},
        "AccessCounter": {"num_rows": 5},
        "RowSampler": {"num_rows": 5, "capacity": 1},
        "ChangeMeter": {"weight": weight},
    }.items():
        with pytest.raises(UsageError, match="device is 99; there are"):
            getattr(device.native, f"Device{kind}")(name="t", device=99, **options)
    with pytest.raises(UsageError, match=r"'t' has 4294967295 rows; .* at most 4294967294"):
        device.native.DeviceAccessCounter(name="t", num_rows=2**32 - 1, device=0)
