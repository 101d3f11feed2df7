import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext import _C
from cpr_ext.errors import RowIndexError, UsageError
from python_tests.examples import examples

POOLS = {0: None} | {threads: _C.ThreadPool(num_threads=threads) for threads in range(1, 5)}


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
    threads=st.sampled_from(list(POOLS)),
    seed=st.integers(0, 99),
)
def test_a_batch_is_counted_table_by_table(tables, threads, seed):
    random = np.random.default_rng(seed)
    sizes = [1, 64, 5000, 300_000]
    trackers = counters(*sizes)
    expected = [np.zeros(size, dtype=np.int64) for size in sizes]
    indices = []
    for which, num_indices, dtype in tables:
        indices.append(random.integers(0, sizes[which], num_indices).astype(dtype))
        expected[which] += np.bincount(indices[-1], minlength=sizes[which])
    _C.count_lookups([trackers[which] for which, _, _ in tables], indices, POOLS[threads])
    for tracker, counts in zip(trackers, expected, strict=True):
        np.testing.assert_array_equal(tracker.counts(), counts)


def all_kinds(seed):
    weight = np.zeros((3000, 2), dtype=np.float32)
    return [
        _C.DirtyRows(name="a", num_rows=3000),
        _C.AccessCounter(name="b", num_rows=3000),
        _C.RowSampler(name="c", num_rows=3000, capacity=100, period=3, seed=seed),
        _C.ChangeMeter(name="d", weight=weight),
    ], weight


@pytest.mark.parametrize("threads", POOLS)
def test_the_number_of_threads_changes_no_tracker(threads):
    random = np.random.default_rng(0)
    trackers, weight = all_kinds(seed=5)
    alone, _ = all_kinds(seed=5)
    which = random.integers(0, 4, 12)
    for _ in range(3):
        indices = [random.integers(0, 3000, 25_000) for _ in which]
        _C.count_lookups([trackers[i] for i in which], indices, POOLS[threads])
        for i, rows in zip(which, indices, strict=True):
            alone[i].observe(rows)
        for tracker, other in zip(trackers, alone, strict=True):
            first = tracker.select(0, 3000, 50, weight=weight)
            np.testing.assert_array_equal(first, other.select(0, 3000, 50, weight=weight))
            np.testing.assert_array_equal(tracker.dirty_rows(), other.dirty_rows())


@pytest.mark.parametrize("threads", POOLS)
@pytest.mark.parametrize("num_indices", [3, 100_000])
def test_one_bad_index_leaves_every_table_as_it_was(threads, num_indices):
    trackers = counters(10, 20, 30)
    indices = [np.full(num_indices, i) for i in range(3)]
    indices[2][1] = 30
    with pytest.raises(RowIndexError, match="'t2': index 30 at position 1"):
        _C.count_lookups(trackers, indices, POOLS[threads])
    assert [tracker.num_dirty() for tracker in trackers] == [0, 0, 0]


def test_the_first_table_at_fault_is_named():
    with pytest.raises(RowIndexError, match="'t0': index -1"):
        _C.count_lookups(counters(5, 5), [np.array([0, -1]), np.array([9])])


def test_an_empty_batch_and_empty_lookups_change_nothing():
    _C.count_lookups([], [])
    trackers = counters(5, 6)
    _C.count_lookups(trackers, (np.array([], dtype=np.int64), np.zeros((0, 4), dtype=np.int32)))
    assert [tracker.num_dirty() for tracker in trackers] == [0, 0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.array([1.0]), "float64.*int32, int64"),
        (np.array([1], dtype=np.int16), "int16.*astype"),
        (np.array([1], dtype=np.uint64), "uint64"),
        (np.array([1], dtype=">i8"), ">i8"),
        (np.array([True]), "bool"),
        (np.arange(10)[::2], "contiguous"),
        (np.arange(10).reshape(2, 5).T, "contiguous"),
        (np.frombuffer(bytes(17), dtype=np.uint8)[1:].view(np.int64), "contiguous"),
        ([1, 2], "list.*numpy.ndarray"),
        (None, "NoneType"),
    ],
)
def test_what_is_no_index_array_is_refused_by_table_and_remedy(bad, message):
    trackers = counters(10, 10)
    with pytest.raises(UsageError, match=f"'t1'.*{message}"):
        _C.count_lookups(trackers, [np.array([1]), bad])
    assert trackers[0].num_dirty() == 0


def test_trackers_and_indices_must_match_in_number():
    with pytest.raises(UsageError, match="2 trackers but 1"):
        _C.count_lookups(counters(1, 1), [np.array([0])])


def test_what_is_no_tracker_is_refused():
    with pytest.raises(UsageError, match=r"trackers\[1\] is a str.*AccessCounter"):
        _C.count_lookups([*counters(1), "users"], [np.array([0])] * 2)
    with pytest.raises(UsageError, match=r"trackers\[0\] is a NoneType"):
        _C.count_lookups([None], [np.array([0])])
