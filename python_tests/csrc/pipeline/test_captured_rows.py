"""csrc/tracking/captured_rows: trackers forget each row when it is captured, and never later."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from python_tests.csrc import segments
from python_tests.csrc.pipeline.test_copy_on_write import keep_all, pipeline
from python_tests.csrc.segments import Layout, random_table

ROWS = 5000
SLOT_BYTES = 64 << 10


def make_trackers(kinds):
    return [getattr(native, kind)(name="t", num_rows=ROWS) for kind in kinds]


def captured_rows(trackers, table):
    rows = native.CapturedRows()
    rows.add_table(
        trackers=trackers,
        weight=None,
        begin=table.range_begin,
        end=table.range_begin + table.range_rows,
        row_ids=table.row_ids,
    )
    return rows


def counts_of(counter):
    return counter.counts().astype(np.int64)


def look_up(trackers, plain, rows):
    for tracker in trackers:
        tracker.observe(rows)
    np.add.at(plain, rows, 1)


@given(
    is_range=st.booleans(),
    is_copied=st.booleans(),
    steps=st.lists(
        st.tuples(st.sampled_from([0, 1, 20_000]), st.integers(0, 300)), min_size=1, max_size=8
    ),
    fails=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_what_was_looked_up_before_the_capture_is_forgotten_and_nothing_later(
    tmp_path_factory, is_range, is_copied, steps, fails, seed
):
    random = np.random.default_rng(seed)
    saved = np.sort(random.choice(ROWS, 3000, replace=False)).astype(np.int64)
    table = random_table(num_rows=ROWS, row_ids=None if is_range else saved)
    if is_range:
        table.range_begin, table.range_rows = 700, 4000
    trackers = make_trackers(["AccessCounter", "DirtyRows"])
    plain = np.zeros(ROWS, np.int64)
    look_up(trackers, plain, random.integers(0, ROWS, 4000))
    at_start = plain.copy()
    rows = captured_rows(trackers, table)
    job = segments.start(
        pipeline(3, SLOT_BYTES, 1 << 20),
        tmp_path_factory.mktemp("taken") / "s",
        Layout([table]),
        direct_io=False,
        copy_on_write=is_copied,
        max_chunk_bytes=SLOT_BYTES // 4,
        captured=rows,
    )
    waiting = np.zeros(ROWS, bool)  # rows of the segment that nothing has captured yet
    waiting[table.saved_ids] = True
    forgotten = np.zeros(ROWS, np.int64)

    def forget(row_ids):
        row_ids = row_ids[waiting[row_ids]]
        waiting[row_ids] = False
        forgotten[row_ids] += plain[row_ids]
        plain[row_ids] = 0

    for max_bytes, count in steps:
        if max_bytes:
            chunks = job.capture(step=1, max_bytes=max_bytes, wait_for_slot=True)
            for _, first, size, *_ in chunks:
                forget(table.saved_ids[first : first + size])
        changed = random.integers(0, ROWS, count)
        if is_copied and job.state == "capturing":
            keep_all(job, (0, changed))  # has room for all: nothing more is captured for it
            forget(np.unique(changed))
        look_up(trackers, plain, changed)
        assert np.array_equal(counts_of(trackers[0]), plain)
        assert np.array_equal(trackers[1].dirty_rows(), np.flatnonzero(plain))
    if not fails:
        return
    job.cancel("the disk is full")
    rows.put_back()
    assert np.array_equal(counts_of(trackers[0]), plain + forgotten)
    assert np.array_equal(trackers[1].dirty_rows(), np.flatnonzero(plain + forgotten))
    assert (plain + forgotten).sum() >= at_start.sum()
    rows.put_back()  # once is enough
    assert np.array_equal(counts_of(trackers[0]), plain + forgotten)


@pytest.mark.parametrize("begin", [0, 200, 65_000, (1 << 24) - 100, 1 << 31])
def test_rows_that_change_may_come_in_any_order_and_have_any_number(tmp_path, begin):
    """Trackers want them in ascending order, and refuse another."""
    table = random_table(num_rows=ROWS, first_row_id=begin, range_begin=begin, range_rows=ROWS)
    tracker = native.DirtyRows(name="t", num_rows=begin + ROWS)
    tracker.observe(np.arange(begin, begin + ROWS))
    job = segments.start(
        pipeline(2, SLOT_BYTES, 1 << 20),
        tmp_path / "s",
        Layout([table]),
        copy_on_write=True,
        captured=captured_rows([tracker], table),
    )
    changing = begin + np.random.default_rng(0).permutation(ROWS)[:3000]
    keep_all(job, (0, changing))
    left = np.setdiff1d(np.arange(begin, begin + ROWS), changing)
    assert np.array_equal(tracker.dirty_rows(), left)
    job.cancel("enough")


def test_rows_that_it_does_not_have_are_refused(tmp_path):
    table = random_table(num_rows=ROWS, row_ids=np.arange(10))
    trackers = make_trackers(["AccessCounter"])
    pipe = pipeline(2, SLOT_BYTES, 0)
    with pytest.raises(UsageError, match="1 tables but trackers of 0"):
        segments.start(pipe, tmp_path / "s", Layout([table]), captured=native.CapturedRows())
    rows = captured_rows(trackers, table)
    with pytest.raises(UsageError, match="a tracker is None"):
        rows.add_table(trackers=[None], weight=None, begin=0, end=1, row_ids=None)
    outside = native.CapturedRows()
    outside.add_table(trackers=trackers, weight=None, begin=0, end=ROWS + 1, row_ids=None)
    with pytest.raises(UsageError, match="is not inside its rows"):
        outside.take_all()
    outside.put_back()
    assert trackers[0].num_dirty() == 0
