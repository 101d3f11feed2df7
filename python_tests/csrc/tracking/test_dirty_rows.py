"""csrc/tracking/dirty_rows.h, cuda/dirty_rows.h and rotation.h: marked rows, each in its turn."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_tests.csrc import backends
from python_tests.examples import examples


@pytest.mark.parametrize("begin", [0, 1, 31, 32, 33, 62, 63, 64, 65, 4095])
def test_rows_of_any_range_are_counted_listed_and_taken(backend, begin):
    dirty = np.unique(np.random.default_rng(begin).integers(0, 20_000, 6000))
    dirty = np.union1d(dirty, np.arange(begin, begin + 140))
    for size in (0, 1, 31, 32, 33, 62, 63, 64, 65, 128, 9000, 20_000 - begin):
        tracker = backend.dirty_rows("t", 20_000)
        tracker.observe(dirty.astype(np.int32))
        end = begin + size
        inside = (begin <= dirty) & (dirty < end)
        expected = dirty[inside]
        assert tracker.num_dirty(begin, end) == len(expected)
        assert tracker.is_clean(begin, end) == (len(expected) == 0)
        np.testing.assert_array_equal(tracker.dirty_rows(begin, end), expected)
        half = len(expected) // 2
        np.testing.assert_array_equal(tracker.select(begin, end, half), expected[:half])
        np.testing.assert_array_equal(tracker.take_range(begin, end).row_ids, expected)
        np.testing.assert_array_equal(tracker.dirty_rows(), dirty[~inside])


def test_more_words_than_the_largest_grid_has_threads_are_counted(device):
    threads = 2048 * 256
    words = np.array([0, 1, threads - 1, threads, threads + 1, threads + 200])
    tracker = device.dirty_rows("t", 32 * (threads + 300))
    tracker.observe(np.concatenate([32 * words, 32 * words + 31]))
    assert tracker.num_dirty() == 2 * len(words)
    assert tracker.num_dirty(32 * threads, 32 * (threads + 1)) == 2


def save(tracker, k, begin=0, end=10):
    """Selects and takes; returns the rows and what puts them back."""
    row_ids = tracker.select(begin, end, k)
    return row_ids.tolist(), tracker.take(row_ids)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_selections_take_turns_and_saves_that_failed_are_made_up_for(backend, order):
    """In whatever order they are put back. Each range of a table has turns of its own."""

    def made():
        tracker = backend.dirty_rows("t", 10)
        tracker.observe(np.arange(10))
        return tracker

    tracker = made()
    for expected in ([0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9], [2, 3, 4, 5]):
        assert tracker.select(0, 10, 4).tolist() == expected  # not taken: it comes again
        assert save(tracker, 4)[0] == expected
        tracker.observe(np.arange(10))
    tracker = made()
    for begin, expected in ((0, [0, 1]), (5, [5, 6]), (5, [7, 8]), (0, [2, 3])):
        assert save(tracker, 2, begin, begin + 5)[0] == expected
        tracker.observe(np.arange(10))
    tracker = made()
    assert save(tracker, 3)[0] == [0, 1, 2]
    failed = [save(tracker, 3)[1] for _ in range(2)]
    for number in order:
        tracker.put_back(failed[number])
    tracker.observe(np.arange(10))
    assert save(tracker, 3)[0] == [3, 4, 5]
    tracker = made()
    _, first = save(tracker, 3)
    second = tracker.select(0, 10, 4)
    tracker.take(second[:2])
    tracker.put_back(first)
    tracker.take(second[2:])  # a save under way when an earlier one fails does not pass its rows
    assert second.tolist() == [3, 4, 5, 6]
    assert save(tracker, 3)[0] == [0, 1, 2]


@pytest.mark.emulated
@examples(60)
@given(
    backend=st.sampled_from(["cpu", "cpu", "cpu", "emulated"]),
    size=st.sampled_from([1, 2, 7, 64, 130]),
    share=st.floats(0.01, 1),
    seed=st.integers(0, 2**32 - 1),
    updates=st.sampled_from(["all", "some", "the lower half"]),
    failing=st.sampled_from([0.0, 0.3, 0.7]),
)
def test_every_dirty_row_is_saved_within_a_whole_round_of_saves(
    backend, size, share, seed, updates, failing
):
    """Rows go on to be updated; saves are taken in parts, and fail at any of them."""
    random = np.random.default_rng(seed)
    begin, k = 3, math.ceil(share * size)
    tracker = backends.find(backend).dirty_rows("t", begin + size + 5)
    waited = np.zeros(size, dtype=int)  # saves that passed over it while it was dirty
    most = math.ceil(size / k)

    def update():
        chosen = {
            "all": np.arange(size),
            "some": random.integers(0, size, random.integers(1, size + 1)),
            "the lower half": np.arange((size + 1) // 2),
        }[updates]
        tracker.observe(begin + chosen)

    tracker.observe(begin + np.arange(size))
    for _ in range(4 * most if size < 100 else 2 * most):
        dirty = tracker.dirty_rows(begin, begin + size)
        row_ids = tracker.select(begin, begin + size, k)
        assert len(row_ids) == min(k, len(dirty))
        cuts = np.sort(random.integers(0, len(row_ids) + 1, 2))
        parts = [part for part in np.split(row_ids, cuts) if len(part)]
        fails = random.random() < failing
        num_taken = random.integers(0, len(parts) + 1) if fails else len(parts)
        taken = []
        for part in parts[:num_taken]:
            taken.append(tracker.take(part))
            update()
        if fails:
            for number in random.permutation(len(taken)):
                tracker.put_back(taken[number])
            update()
            continue
        waited[dirty - begin] += 1
        waited[row_ids - begin] = 0
        assert waited.max() < most
