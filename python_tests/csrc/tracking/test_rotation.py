"""csrc/tracking/rotation.h: where more rows are dirty than a save takes, each has its turn."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_tests.csrc import backends
from python_tests.examples import examples


@pytest.fixture(params=backends.NAMES)
def make(request):
    found = backends.find(request.param)
    return lambda num_rows=10: found.dirty_rows("t", num_rows)


def save(tracker, k, begin=0, end=None):
    """Selects and takes; returns the rows and what puts them back."""
    row_ids = tracker.select(begin, tracker.num_rows if end is None else end, k)
    return row_ids.tolist(), tracker.take(row_ids)


def test_a_selection_begins_behind_the_rows_taken_of_the_last_one(make):
    tracker = make()
    tracker.observe(np.arange(10))
    for expected in ([0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9], [2, 3, 4, 5]):
        assert save(tracker, 4)[0] == expected
        tracker.observe(np.arange(10))


def test_what_was_selected_and_not_taken_comes_again(make):
    tracker = make()
    tracker.observe(np.arange(10))
    assert tracker.select(0, 10, 4).tolist() == tracker.select(0, 10, 4).tolist() == [0, 1, 2, 3]
    tracker.take(np.array([0, 1]))  # the first part of a save that then stopped
    assert tracker.select(0, 10, 4).tolist() == [2, 3, 4, 5]


def test_the_ranges_of_a_table_take_turns_apart_from_each_other(make):
    tracker = make()
    tracker.observe(np.arange(10))
    assert save(tracker, 2, 0, 5)[0] == [0, 1]
    assert save(tracker, 2, 5, 10)[0] == [5, 6]
    tracker.observe(np.arange(10))
    assert save(tracker, 2, 5, 10)[0] == [7, 8]
    assert save(tracker, 2, 0, 5)[0] == [2, 3]


def test_saves_that_failed_are_made_up_for_in_whatever_order_they_are_put_back(make):
    for order in ([0, 1], [1, 0]):
        tracker = make()
        tracker.observe(np.arange(10))
        assert save(tracker, 3)[0] == [0, 1, 2]
        failed = [save(tracker, 3)[1] for _ in range(2)]
        for number in order:
            tracker.put_back(failed[number])
        tracker.observe(np.arange(10))
        assert save(tracker, 3)[0] == [3, 4, 5]


def test_a_save_under_way_when_an_earlier_one_fails_does_not_pass_its_rows(make):
    tracker = make()
    tracker.observe(np.arange(10))
    _, failed = save(tracker, 3)
    second = tracker.select(0, 10, 4)
    tracker.take(second[:2])
    tracker.put_back(failed)
    tracker.take(second[2:])
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
