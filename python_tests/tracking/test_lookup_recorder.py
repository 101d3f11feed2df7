"""Rows that a fused kernel reports: which count, and when."""

import pytest
import torch

import cpr_ext
from cpr_ext._native import native
from cpr_ext.errors import RowIndexError
from cpr_ext.state.table import Table, register_tables
from cpr_ext.tracking.lookup_recorder import LookupRecorder
from cpr_ext.tracking.table_events import TableEvents
from python_tests.helpers import Kernel

NUM_ROWS = 20


class Tracked:
    """Two tables, one of a kernel; ``counts()`` returns its counts and forgets them."""

    def __init__(self):
        self.kernel = Kernel()
        self.tables = [
            *register_tables({"w": torch.zeros(NUM_ROWS, 2)}, []),
            Table("fused", torch.zeros(NUM_ROWS, 2), lookups=self.kernel),
        ]
        self.trackers = [
            native.AccessCounter(name=table.name, num_rows=NUM_ROWS) for table in self.tables
        ]
        counter = native.RowCounter(
            [table.weight for table in self.tables], [[tracker] for tracker in self.trackers]
        )
        self.heard = []
        self.recorder = LookupRecorder(
            self.tables, counter, TableEvents(), lambda tables, rows: self.heard.extend(rows)
        )
        self.recorder.attach()

    def report(self, *rows):
        self.kernel.changes(self.tables[1], torch.tensor(rows))

    def counts(self):
        self.recorder.flush()
        other, tracker = self.trackers
        assert not other.counts().any()
        counted = {row: int(n) for row, n in enumerate(tracker.counts()) if n}
        tracker.take_range(0, NUM_ROWS)
        return counted


def test_rows_count_with_multiplicity_and_are_told_before_they_change():
    tracked = Tracked()
    tracked.report(2, 2, 5)
    tracked.report(5)
    tracked.kernel.changes(tracked.tables[1], torch.arange(10)[::3])
    assert [row_ids.tolist() for row_ids in tracked.heard] == [[2, 2, 5], [5], [0, 3, 6, 9]]
    assert tracked.counts() == {2: 2, 5: 2, 0: 1, 3: 1, 6: 1, 9: 1}
    assert tracked.recorder.num_lookups == 8
    tracked.recorder.detach()
    assert tracked.kernel.changes is None


@pytest.mark.parametrize("bad", [-1, NUM_ROWS, 2**40])
def test_an_index_outside_its_table_is_named_and_no_counter_changes(bad):
    tracked = Tracked()
    tracked.report(3)
    tracked.report(0, bad)
    with pytest.raises(RowIndexError, match=f"table 'fused': index {bad} at position 1"):
        tracked.recorder.flush()
    assert tracked.counts() == {}


def test_many_lookups_without_a_step_do_not_keep_all_their_indices(monkeypatch):
    monkeypatch.setattr("cpr_ext.tracking.lookup_recorder._MAX_PENDING_LOOKUPS", 10)
    tracked = Tracked()
    for _ in range(50):
        tracked.report(1, 2, 3, 4)
    assert tracked.recorder._pending_lookups <= 10
    assert tracked.counts() == dict.fromkeys((1, 2, 3, 4), 50)


def test_a_step_is_being_made_from_the_first_report_on():
    tracked = Tracked()
    assert not tracked.recorder.is_mid_step
    tracked.report(1)
    tracked.recorder.flush()
    assert tracked.recorder.is_mid_step
    tracked.recorder.begin_step()
    assert not tracked.recorder.is_mid_step
    tracked.report(1)
    tracked.recorder.forget()
    assert not tracked.recorder.is_mid_step
    assert tracked.counts() == {1: 1}  # what was counted before forget()


def test_step_reports_a_bad_index_and_does_not_count_the_step(tmp_path):
    table = Table("b", torch.zeros(NUM_ROWS, 2), lookups=Kernel())
    with cpr_ext.Checkpointer(torch.nn.Module(), [], tmp_path, tables=[table]) as ckpt:
        table.lookups.changes(table, torch.tensor([NUM_ROWS]))
        with pytest.raises(RowIndexError, match=f"'b': index {NUM_ROWS}"):
            ckpt.step()
        assert ckpt.step_count == 0
        ckpt.step()
        assert ckpt.step_count == 1
