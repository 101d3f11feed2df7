"""Row updates that are not saved, against a plain count per row, beside any tracker."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.tracking.trackers import CountedTracker, native_trackers, unsaved_updates

ROWS = 12


def make(kind):
    if kind == "ChangeMeter":
        return native.ChangeMeter(name="t", weight=torch.zeros(ROWS, 2))
    if kind == "RowSampler":
        return native.RowSampler(name="t", num_rows=ROWS, capacity=4)
    return getattr(native, kind)(name="t", num_rows=ROWS)


rows = st.lists(st.integers(0, ROWS - 1), max_size=6)
events = st.lists(
    st.tuples(st.sampled_from(["look", "take", "range", "put_back"]), rows, st.integers(0, ROWS)),
    max_size=20,
)


def captured(tracker, weight, begin, end, row_ids):
    table = native.SegmentTable(name="t", num_rows=0)
    is_range = row_ids is None
    table = table.with_range(begin, end - begin) if is_range else table.with_row_ids(row_ids)
    rows = native.CapturedRows()
    rows.add_tables([native.TrackedTable(native_trackers(tracker), weight)], [table])
    rows.take_all()
    return rows


@pytest.mark.parametrize("kind", ["DirtyRows", "RowSampler", "ChangeMeter", "AccessCounter"])
@given(events=events)
def test_they_are_those_since_each_row_was_last_taken(kind, events):
    weight = torch.zeros(ROWS, 2)
    tracker = CountedTracker(make(kind))
    plain = np.zeros(ROWS, int)
    undo = []
    for event, ids, bound in events:
        chosen = np.unique(np.array(ids, np.int64))
        if event == "look":
            indices = [torch.tensor(ids, dtype=torch.int64)] * 2
            native.count_lookups(list(native_trackers(tracker)), indices)
            np.add.at(plain, ids, 1)
        elif event == "take":
            undo.append((captured(tracker, weight, 0, ROWS, chosen), np.zeros(ROWS, int)))
            undo[-1][1][chosen] = plain[chosen]
            plain[chosen] = 0
        elif event == "range":
            undo.append((captured(tracker, weight, 0, bound, None), np.zeros(ROWS, int)))
            undo[-1][1][:bound] = plain[:bound]
            plain[:bound] = 0
        elif undo:
            taken, counts = undo.pop()
            taken.put_back()
            plain += counts
        assert unsaved_updates(tracker, 3, 9) == plain[3:9].sum()
        assert tracker.num_dirty() == np.count_nonzero(plain)


def test_a_tracker_alone_tells_them_only_if_it_counts():
    counter, dirty = make("AccessCounter"), make("DirtyRows")
    for tracker in (counter, dirty):
        assert native_trackers(tracker) == (tracker,)
        tracker.observe(torch.tensor([1, 1, 5]))
    assert unsaved_updates(counter, 0, ROWS) == 3
    assert unsaved_updates(counter, 0, 5) == 2
    assert unsaved_updates(dirty, 0, ROWS) is None
