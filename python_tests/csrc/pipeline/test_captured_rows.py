"""csrc/tracking/captured_rows: trackers forget each row when it is captured, and never later."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from python_tests.csrc import segments
from python_tests.csrc.segments import Layout, random_table

ROWS = 5000
SLOT_BYTES = 64 << 10


def make_trackers(*kinds):
    return [getattr(native, kind)(name="t", num_rows=ROWS) for kind in kinds]


@given(
    is_range=st.booleans(),
    steps=st.lists(
        st.tuples(st.sampled_from([0, 1, 20_000]), st.integers(0, 300)), min_size=1, max_size=8
    ),
    fails=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_what_was_looked_up_before_the_capture_is_forgotten_and_nothing_later(
    tmp_path_factory, is_range, steps, fails, seed
):
    random = np.random.default_rng(seed)
    saved = np.sort(random.choice(ROWS, 3000, replace=False)).astype(np.int64)
    table = random_table(num_rows=ROWS, row_ids=None if is_range else saved)
    if is_range:
        table.range_begin, table.range_rows = 700, 4000
    trackers = make_trackers("AccessCounter", "DirtyRows")
    plain = np.zeros(ROWS, np.int64)

    def look_up(rows):
        for tracker in trackers:
            tracker.observe(rows)
        np.add.at(plain, rows, 1)

    def check(expected):
        assert np.array_equal(trackers[0].counts().astype(np.int64), expected)
        assert np.array_equal(trackers[1].dirty_rows(), np.flatnonzero(expected))

    look_up(random.integers(0, ROWS, 4000))
    rows = native.CapturedRows()
    rows.add_tables([native.TrackedTable(trackers)], Layout([table]).specs(capture=True))
    job = segments.start(
        native.SnapshotPipeline(num_slots=3, slot_bytes=SLOT_BYTES),
        tmp_path_factory.mktemp("taken") / "s",
        Layout([table]),
        direct_io=False,
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
        look_up(random.integers(0, ROWS, count))
        check(plain)
    if not fails:
        return
    job.cancel("the disk is full")
    for _ in range(2):  # once is enough
        rows.put_back()
        check(plain + forgotten)


def test_rows_that_it_does_not_have_are_refused(tmp_path):
    table = random_table(num_rows=ROWS, row_ids=np.arange(10))
    trackers = make_trackers("AccessCounter")
    pipe = native.SnapshotPipeline(num_slots=2, slot_bytes=SLOT_BYTES)
    with pytest.raises(UsageError, match="1 tables but trackers of 0"):
        segments.start(pipe, tmp_path / "s", Layout([table]), captured=native.CapturedRows())
    with pytest.raises(UsageError, match="a tracker is None"):
        native.TrackedTable([None])
    outside = native.CapturedRows()
    too_many = native.SegmentTable(name="t", num_rows=ROWS + 1)
    outside.add_tables([native.TrackedTable(trackers)], [too_many])
    with pytest.raises(UsageError, match="is not inside its rows"):
        outside.take_all()
    outside.put_back()
    assert trackers[0].num_dirty() == 0
