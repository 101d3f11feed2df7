"""Rows are counted on another thread; no call of a tracker shows that."""

import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext import _C
from cpr_ext.errors import RowIndexError, UsageError
from python_tests.csrc.backends import find
from python_tests.examples import examples

ROWS = 5000
# Rows of a gradient that wait for more, and of one that the thread counts at once.
GATHERED, COUNTED = 2000, 20000
POOL = _C.ThreadPool(num_threads=2)


def weight(num_rows=ROWS):
    return torch.nn.Parameter(torch.zeros(num_rows, 2))


def set_gradient(parameter, row_ids):
    values = torch.ones(len(row_ids), 2)
    indices = torch.as_tensor(row_ids).view(1, -1)
    parameter.grad = torch.sparse_coo_tensor(indices, values, parameter.shape)
    return parameter.grad


def counters(number, num_rows=ROWS):
    return [_C.AccessCounter(name=f"t{i}", num_rows=num_rows) for i in range(number)]


def test_rows_are_compared_by_threads_that_the_counting_needs_too():
    """Else each waits for the other, and training for both."""
    num_rows = 400_000  # of three tables: enough that counting shares them among threads
    weights, trackers = [weight(num_rows) for _ in range(3)], counters(3, num_rows)
    hashes = [_C.HostRowHashes(name=each.name, num_rows=num_rows) for each in trackers]
    arrays = [[parameter.detach()] for parameter in weights]
    counter = _C.RowCounter(weights, [[tracker] for tracker in trackers], POOL)
    for parameter in weights:
        set_gradient(parameter, np.arange(num_rows))
    row_ids = [np.arange(1000)] * 3

    def compare():
        for _ in range(10):
            for each, of_table in zip(hashes, arrays, strict=True):
                each.record_range(of_table, 0, num_rows)
            counter.count_gradients(range(3))
            _C.compare_changing(hashes, arrays, trackers, row_ids, POOL)

    thread = threading.Thread(target=compare, daemon=True)
    thread.start()
    thread.join(100)
    assert not thread.is_alive()


@examples(40)
@given(
    # around the size at which the thread counts
    steps=st.lists(
        st.lists(st.sampled_from([0, 1, 200, 5000, 9000, 16384]), min_size=3, max_size=3),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 99),
    pool=st.sampled_from([None, POOL]),
)
def test_every_call_waits_for_what_was_counted(steps, seed, pool):
    random = np.random.default_rng(seed)
    weights = [weight() for _ in range(3)]
    trackers = counters(3)
    beside = [_C.DirtyRows(name=f"t{i}", num_rows=ROWS) for i in range(3)]
    of_first = trackers[0], beside[0]
    counter = _C.RowCounter(weights, list(zip(beside, trackers, strict=True)), pool)
    expected = np.zeros((3, ROWS), dtype=np.int64)
    taken = None
    for sizes in steps:
        given_rows = [random.integers(0, ROWS, size) for size in sizes]
        for table, row_ids in enumerate(given_rows):
            set_gradient(weights[table], row_ids)
            np.add.at(expected[table], row_ids, 1)
        if random.integers(0, 2):
            assert counter.count_gradients([0, 1, 2]) == (sum(sizes), [0, 1, 2], [])
        else:
            kinds = random.choice([np.int32, np.int64], 3)
            counter.count_rows(
                [2, 0, 1], [given_rows[table].astype(kinds[table]) for table in (2, 0, 1)]
            )
        match random.integers(0, 5):
            case 0:
                np.testing.assert_array_equal(trackers[1].counts(), expected[1])
            case 1:
                for table in range(3):
                    dirty = np.flatnonzero(expected[table])
                    np.testing.assert_array_equal(beside[table].dirty_rows(), dirty)
                    assert trackers[table].num_dirty() == len(dirty)
                    assert beside[table].is_clean(0, ROWS) == (len(dirty) == 0)
            case 2:
                best = np.lexsort((np.arange(ROWS), -expected[2]))[:7]
                best = np.sort(best[expected[2][best] > 0])
                np.testing.assert_array_equal(trackers[2].select(0, ROWS, 7), best)
            case 3 if taken is None:
                taken = [each.take_range(0, ROWS) for each in of_first], expected[0].copy()
                expected[0] = 0
            case 4 if taken is not None:
                for each, rows in zip(of_first, taken[0], strict=True):
                    each.put_back(rows)
                expected[0] += taken[1]
                taken = None
    for table in range(3):
        np.testing.assert_array_equal(trackers[table].counts(), expected[table])


def test_what_was_counted_may_be_overwritten_at_once():
    parameter, (tracker,) = weight(), counters(1)
    counter = _C.RowCounter([parameter], [[tracker]])
    buffer = torch.zeros(4000, dtype=torch.int64)
    expected = np.zeros(ROWS, dtype=np.int64)
    random = np.random.default_rng(0)
    for _ in range(200):
        row_ids = random.integers(0, ROWS, len(buffer))
        np.add.at(expected, row_ids, 1)
        buffer.copy_(torch.from_numpy(row_ids))
        gradient = set_gradient(parameter, buffer)
        if random.integers(0, 2):
            counter.count_gradients([0])
        else:
            counter.count_rows([0], [buffer])
        gradient._indices().fill_(1)
        buffer.fill_(2)
        parameter.grad = None
    np.testing.assert_array_equal(tracker.counts(), expected)


def test_a_row_outside_the_table_is_refused_and_nothing_is_counted():
    weights, trackers = [weight(), weight()], counters(2)
    counter = _C.RowCounter(weights, [[tracker] for tracker in trackers])
    set_gradient(weights[0], [1] * 1000)
    set_gradient(weights[1], [2] * 999)
    weights[1].grad._indices()[0, 700] = ROWS
    with pytest.raises(RowIndexError, match=f"table 't1': index {ROWS} at position 700"):
        counter.count_gradients([0, 1])
    rows = [torch.tensor([1] * 1000), torch.tensor([2, -1])]
    with pytest.raises(RowIndexError, match="table 't1': index -1 at position 1"):
        counter.count_rows([0, 1], rows)
    with pytest.raises(UsageError, match="1 tables but 2 tensors"):
        counter.count_rows([0], rows)
    assert trackers[0].num_dirty() == trackers[1].num_dirty() == 0
    counter.count_gradients([0])
    assert trackers[0].counts()[1] == 1000


def test_gradients_that_are_not_read_here_are_named():
    sparse = weight()
    set_gradient(sparse, [3])
    dense, without, strided, halves = (weight() for _ in range(4))
    dense.grad = torch.ones(ROWS, 2)
    indices = torch.tensor([[4, 0], [5, 0]]).t()[:1]  # every second number
    strided.grad = torch.sparse_coo_tensor(indices, torch.ones(2, 2), strided.shape)
    # Two sparse dimensions: rows and columns.
    halves.grad = torch.sparse_coo_tensor(torch.tensor([[7, 8], [0, 1]]), torch.ones(2), (ROWS, 2))
    weights, trackers = [sparse, dense, without, strided, halves], counters(5)
    counter = _C.RowCounter(weights, [[tracker] for tracker in trackers])
    num_rows, stepped, unread = counter.count_gradients(range(5))
    assert stepped == [0, 1, 3, 4]
    assert set(unread) <= {1, 3}
    assert 1 in unread
    assert trackers[0].dirty_rows().tolist() == [3]
    assert trackers[4].dirty_rows().tolist() == [7, 8]
    if 3 not in unread:  # this PyTorch has made them contiguous
        assert trackers[3].dirty_rows().tolist() == [4, 5]
    assert num_rows == 3 + 2 * (3 not in unread)


def test_an_error_of_the_thread_is_raised_by_every_later_call():
    emulated = find("emulated").native
    parameter = weight()
    failing = emulated.emulator.FailingTracker(name="t", num_rows=ROWS)
    counter = emulated.RowCounter([parameter], [[failing]])
    assert counter.error is None
    set_gradient(parameter, [1] * COUNTED)
    counter.count_gradients([0])  # on the thread
    for call in (counter.wait, failing.num_dirty, lambda: failing.take_range(0, ROWS)):
        for _ in range(2):
            with pytest.raises(MemoryError):
                call()
    for size in (COUNTED, GATHERED, 0):
        set_gradient(parameter, [1] * size)
        with pytest.raises(MemoryError):
            counter.count_gradients([0])
    assert "bad_alloc" in counter.error
    child = os.fork()
    if child == 0:
        counter.wait()
        os._exit(counter.error is not None)
    assert os.waitpid(child, 0)[1] == 0
    del counter
    assert failing.num_dirty() == 0


@pytest.mark.parametrize("size", [GATHERED, COUNTED])
def test_a_forked_child_waits_for_nothing_and_a_tracker_outlives_its_counter(size):
    parameter, (tracker,) = weight(), counters(1)
    set_gradient(parameter, [1] * size)
    for times in (1, 2):
        counter = _C.RowCounter([parameter], [[tracker]])
        counter.count_gradients([0])
        child = os.fork()
        if child == 0:
            tracker.num_dirty()
            counter.wait()
            counter.count_gradients([0])
            del counter, tracker
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        del counter
        assert tracker.counts()[1] == times * size


def test_calls_in_place_come_after_those_on_the_thread():
    """A sampler's state depends on the order of its lookups."""
    parameter = weight()
    random = np.random.default_rng(3)
    samplers = [
        _C.RowSampler(name="s", num_rows=ROWS, capacity=50, period=3, seed=5) for _ in range(2)
    ]
    counter = _C.RowCounter([parameter], [[samplers[0]]])
    for _ in range(20):
        row_ids = random.integers(0, ROWS, 3000)
        set_gradient(parameter, row_ids)
        counter.count_gradients([0])
        samplers[1].observe(row_ids)
        more = random.integers(0, ROWS, 10)
        for sampler in samplers:
            sampler.observe(more)
        assert samplers[0].num_sampled == samplers[1].num_sampled
    chosen = [sampler.select(0, ROWS, 30).tolist() for sampler in samplers]
    assert chosen[0] == chosen[1]
