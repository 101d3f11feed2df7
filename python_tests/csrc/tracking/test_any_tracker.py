"""What holds for every tracker: its life as a whole, against the reference."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule

from cpr_ext import _C
from cpr_ext.errors import RowIndexError, UsageError
from python_tests.csrc import backends, reference
from python_tests.examples import examples

POOLS = [None] + [_C.ThreadPool(num_threads=threads) for threads in range(1, 5)]
SIZES = st.sampled_from([1, 2, 7, 63, 64, 65, 128, 200])


class TrackerLife(RuleBasedStateMachine):
    """Observes, selects, takes and gives back at random; both sides must agree after each step."""

    taken = Bundle("taken")

    def make(self, num_rows, data):
        raise NotImplementedError

    @initialize(num_rows=SIZES, data=st.data())
    def start(self, num_rows, data):
        self.num_rows = num_rows
        self.weight = None
        self.native, self.model = self.make(num_rows, data)

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
        if pending is None:  # on the CPU
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
        native, model = pair
        self.native.put_back(native)
        assert native.num_rows == 0
        self.model.put_back(model)
        model.clear()
        self.check()


class DirtyRowsLife(TrackerLife):
    def make(self, num_rows, data):
        return _C.DirtyRows(name="t", num_rows=num_rows), reference.DirtyRows(num_rows)


class EmulatedDirtyRowsLife(TrackerLife):
    backend = "emulated"

    def make(self, num_rows, data):
        native = backends.find(self.backend).dirty_rows("t", num_rows)
        return native, reference.DirtyRows(num_rows)


class CudaDirtyRowsLife(EmulatedDirtyRowsLife):
    backend = "cuda"


class AccessCounterLife(TrackerLife):
    def make(self, num_rows, data):
        return _C.AccessCounter(name="t", num_rows=num_rows), reference.AccessCounter(num_rows)

    def check(self, begin=0, end=None):
        super().check(begin, end)
        assert self.native.counts().tolist() == self.model.count


class EmulatedCounterLife(AccessCounterLife):
    backend = "emulated"

    def make(self, num_rows, data):
        found = backends.find(self.backend)
        return found.access_counter("t", num_rows), reference.AccessCounter(num_rows)


class CudaCounterLife(EmulatedCounterLife):
    backend = "cuda"


class RowSamplerLife(TrackerLife):
    def make(self, num_rows, data):
        options = {
            "capacity": data.draw(st.integers(1, num_rows + 1)),
            "period": data.draw(st.integers(1, 5)),
            "seed": data.draw(st.integers(0, 2**64 - 1)),
        }
        native = _C.RowSampler(name="t", num_rows=num_rows, **options)
        return native, reference.RowSampler(num_rows, **options)

    def check(self, begin=0, end=None):
        super().check(begin, end)
        assert self.native.num_sampled == len(self.model.sample) <= self.native.capacity


class EmulatedSamplerLife(RowSamplerLife):
    """With room for every row: where rows are evicted a device's order of lookups is its own."""

    backend = "emulated"

    def make(self, num_rows, data):
        options = {
            "capacity": num_rows,
            "period": data.draw(st.integers(1, 5)),
            "seed": data.draw(st.integers(0, 2**64 - 1)),
        }
        found = backends.find(self.backend)
        return found.row_sampler("t", num_rows, **options), reference.RowSampler(
            num_rows, **options
        )


class CudaSamplerLife(EmulatedSamplerLife):
    backend = "cuda"


class ChangeMeterLife(TrackerLife):
    """Whole numbers as weights: their sums of squares are exact in any order."""

    backend = "cpu"

    def make(self, num_rows, data):
        dtype = data.draw(st.sampled_from(["float16", "float32", "float64"]))
        embedding_dim = data.draw(st.sampled_from([1, 3, 8, 17]))
        wide = np.zeros((num_rows, embedding_dim + data.draw(st.integers(0, 2))), dtype=dtype)
        self.weight = wide[:, :embedding_dim]
        self.weight += np.arange(num_rows)[:, None] % 5
        native = backends.find(self.backend).change_meter("t", self.weight)
        return native, reference.ChangeMeter(self.weight)


class EmulatedMeterLife(ChangeMeterLife):
    backend = "emulated"


class CudaMeterLife(ChangeMeterLife):
    backend = "cuda"


LIVES = (DirtyRowsLife, AccessCounterLife, RowSamplerLife, ChangeMeterLife)
CUDA_LIVES = (CudaDirtyRowsLife, CudaCounterLife, CudaSamplerLife, CudaMeterLife)
EMULATED_LIVES = (
    *(EmulatedDirtyRowsLife, EmulatedCounterLife),
    *(EmulatedSamplerLife, EmulatedMeterLife),
)
DEVICE_LIVES = (*EMULATED_LIVES, *CUDA_LIVES)
for life in CUDA_LIVES:
    pytest.mark.gpu(life.TestCase)
for life in EMULATED_LIVES:
    pytest.mark.emulated(life.TestCase)
for life in LIVES:
    life.TestCase.settings = settings(examples(60), stateful_step_count=25)
for life in DEVICE_LIVES:
    life.TestCase.settings = settings(examples(30), stateful_step_count=25)

TestDirtyRowsLife = DirtyRowsLife.TestCase
TestAccessCounterLife = AccessCounterLife.TestCase
TestEmulatedCounterLife = EmulatedCounterLife.TestCase
TestCudaCounterLife = CudaCounterLife.TestCase
TestRowSamplerLife = RowSamplerLife.TestCase
TestEmulatedSamplerLife = EmulatedSamplerLife.TestCase
TestCudaSamplerLife = CudaSamplerLife.TestCase
TestChangeMeterLife = ChangeMeterLife.TestCase
TestEmulatedMeterLife = EmulatedMeterLife.TestCase
TestCudaMeterLife = CudaMeterLife.TestCase
TestEmulatedDirtyRowsLife = EmulatedDirtyRowsLife.TestCase
TestCudaDirtyRowsLife = CudaDirtyRowsLife.TestCase


WEIGHT = np.zeros((100, 4), dtype=np.float32)
MAKERS = {
    "DirtyRows": lambda name="users": _C.DirtyRows(name=name, num_rows=100),
    "AccessCounter": lambda name="users": _C.AccessCounter(name=name, num_rows=100),
    "RowSampler": lambda name="users": _C.RowSampler(name=name, num_rows=100, capacity=50),
    "ChangeMeter": lambda name="users": _C.ChangeMeter(name=name, weight=WEIGHT),
}


DEVICE_MAKERS = {
    "DirtyRows": lambda found, name: found.dirty_rows(name, 100),
    "AccessCounter": lambda found, name: found.access_counter(name, 100),
    "RowSampler": lambda found, name: found.row_sampler(name, 100, capacity=50),
    "ChangeMeter": lambda found, name: found.change_meter(name, WEIGHT),
}


def maker(backend, kind):
    if backend == "cpu":
        return MAKERS[kind]
    found = backends.find(backend)
    return lambda name="users": DEVICE_MAKERS[kind](found, name)


PLACES = [
    *(("cpu", kind) for kind in MAKERS),
    *(("emulated", kind) for kind in DEVICE_MAKERS),
    *(pytest.param(("cuda", kind), marks=pytest.mark.gpu) for kind in DEVICE_MAKERS),
]


@pytest.fixture(params=PLACES, ids="-".join)
def place(request):
    return request.param


@pytest.fixture
def make(place):
    return maker(*place)


@pytest.fixture(params=MAKERS)
def make_on_host(request):
    return MAKERS[request.param]


def test_a_new_tracker_has_no_dirty_row(make):
    tracker = make()
    assert tracker.num_dirty() == 0
    assert tracker.dirty_rows().tolist() == []
    assert tracker.select(0, 100, 10, weight=WEIGHT).tolist() == []
    assert tracker.take_range(0, 100, weight=WEIGHT).num_rows == 0


def test_a_tracker_tells_its_name_size_and_memory(make):
    tracker = make()
    assert (tracker.name, tracker.num_rows) == ("users", 100)
    assert 100 / 8 <= tracker.memory_bytes() <= 100 * 32
    assert "users" in repr(tracker)
    assert "100" in repr(tracker)


@pytest.mark.usefixtures("every_instruction_set")
@pytest.mark.parametrize("bad", [-1, 100, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_an_index_outside_the_table_is_named_and_nothing_changes(make_on_host, bad, dtype):
    tracker = make_on_host()
    tracker.observe(np.array([5]))
    indices = np.array([[1, 2], [bad, -7]], dtype=dtype)
    for call in (tracker.check, tracker.observe):
        with pytest.raises(RowIndexError, match=f"'users': index {bad} at position 2 .*100"):
            call(indices)
        assert tracker.dirty_rows().tolist() == [5]


@pytest.mark.usefixtures("every_instruction_set")
@pytest.mark.parametrize("bad", [-(2**63), 2**63 - 1, 2**32, -(2**32) + 1])
def test_an_index_of_64_bits_outside_the_table_is_refused(make_on_host, bad):
    with pytest.raises(RowIndexError, match=str(bad)):
        make_on_host().observe(np.array([bad]))


@pytest.mark.parametrize(("begin", "end"), [(-1, 5), (0, 101), (6, 5)])
def test_a_range_outside_the_table_is_refused(make, begin, end):
    tracker = make()
    for call in (
        lambda: tracker.num_dirty(begin, end),
        lambda: tracker.is_clean(begin, end),
        lambda: tracker.dirty_rows(begin, end),
        lambda: tracker.select(begin, end, 1, weight=WEIGHT),
        lambda: tracker.take_range(begin, end, weight=WEIGHT),
    ):
        with pytest.raises(UsageError, match=r"users.*range"):
            call()


@pytest.mark.parametrize("row_ids", [[1, 1], [2, 1], [-1, 3], [3, 100]])
def test_row_ids_to_take_must_ascend_inside_the_table(make, row_ids):
    tracker = make()
    tracker.observe(np.array([1, 2, 3]))
    with pytest.raises(UsageError, match="users"):
        tracker.take(np.array(row_ids), weight=WEIGHT)
    assert tracker.dirty_rows().tolist() == [1, 2, 3]


def test_row_ids_to_take_must_be_int64(make):
    with pytest.raises(UsageError, match=r"int32.*int64"):
        make().take(np.array([1], dtype=np.int32), weight=WEIGHT)


def test_rows_cannot_be_put_back_into_another_table_or_tracker(place, make):
    tracker = make()
    tracker.observe(np.array([1]))
    taken = tracker.take_range(0, 100, weight=WEIGHT)
    assert "users" in repr(taken)
    others = [make("items")]
    others += [
        maker(place[0], kind)()
        for kind in (MAKERS if place[0] == "cpu" else DEVICE_MAKERS)
        if kind != place[1]
    ]
    for other in others:
        with pytest.raises(UsageError, match="users"):
            other.put_back(taken)
    assert taken.num_rows == 1
    tracker.put_back(taken)
    assert tracker.dirty_rows().tolist() == [1]


def test_giving_back_twice_does_no_more_than_once(make):
    tracker = make()
    tracker.observe(np.array([1]))
    taken = tracker.take_range(0, 100, weight=WEIGHT)
    tracker.put_back(taken)
    tracker.take_range(0, 100, weight=WEIGHT)
    tracker.put_back(taken)
    assert tracker.num_dirty() == 0


@pytest.mark.parametrize("tracker_type", ["DirtyRows", "AccessCounter", "RowSampler"])
@pytest.mark.parametrize("num_rows", [0, -1])
def test_a_table_without_rows_is_refused(tracker_type, num_rows):
    options = {"capacity": 1} if tracker_type == "RowSampler" else {}
    with pytest.raises(UsageError, match=r"a table without rows.*'empty'"):
        getattr(_C, tracker_type)(name="empty", num_rows=num_rows, **options)
