"""Row updates that are not saved, against a plain count per row."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native

ROWS = 12


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
    rows.add_tables([native.TrackedTable((tracker,), weight)], [table])
    rows.take_all()
    return rows


@given(events=events)
def test_they_are_those_since_each_row_was_last_taken(events):
    weight = torch.zeros(ROWS, 2)
    tracker = native.AccessCounter(name="t", num_rows=ROWS)
    plain = np.zeros(ROWS, int)
    undo = []
    for event, ids, bound in events:
        chosen = np.unique(np.array(ids, np.int64))
        if event == "look":
            indices = [torch.tensor(ids, dtype=torch.int64)]
            native.count_lookups([tracker], indices)
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
        assert tracker.sum_counts(3, 9) == plain[3:9].sum()
        assert tracker.num_dirty() == np.count_nonzero(plain)
