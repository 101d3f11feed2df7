"""Lookups that are reported by a source or by the user: which count, and when."""

import pytest
import torch

import cpr_ext
from cpr_ext._native import native
from cpr_ext.errors import RowIndexError, UsageError
from cpr_ext.state.table import Table, register_tables
from cpr_ext.tracking.lookup_recorder import LookupRecorder
from cpr_ext.tracking.table_events import TableEvents

NUM_ROWS = 20


class Source:
    """Reports lookups when asked to."""

    def attach(self, note):
        self.note = note
        return [self]

    def remove(self):
        self.note = None


class Tracked:
    """Two tables; ``counts()`` returns their counts by table and forgets them."""

    def __init__(self):
        self.source = Source()
        self.tables = [
            *register_tables({"w": torch.zeros(NUM_ROWS, 2)}, []),
            Table("fused", torch.zeros(NUM_ROWS, 2), lookups=self.source),
        ]
        self.trackers = [
            native.AccessCounter(name=table.name, num_rows=NUM_ROWS) for table in self.tables
        ]
        counter = native.RowCounter(
            [table.weight for table in self.tables], [[tracker] for tracker in self.trackers]
        )
        self.recorder = LookupRecorder(self.tables, counter, TableEvents())
        self.recorder.attach()

    def report(self, *rows):
        self.source.note(self.tables[1], torch.tensor(rows))

    def counts(self):
        self.recorder.flush()
        counted = {}
        for table, tracker in zip(self.tables, self.trackers, strict=True):
            counted[table.name] = {row: int(n) for row, n in enumerate(tracker.counts()) if n}
            tracker.take_range(0, NUM_ROWS)
        return counted


def test_recorded_lookups_count_and_wrong_ones_are_refused():
    tracked = Tracked()
    tracked.recorder.record("w", torch.tensor([[1, 2], [2, 3]], dtype=torch.int32))
    assert tracked.counts() == {"w": {1: 1, 2: 2, 3: 1}, "fused": {}}
    with pytest.raises(UsageError, match="no table 'v'; there are: w"):
        tracked.recorder.record("v", torch.tensor([1]))
    for wrong in ([1, 2], 3, None):
        with pytest.raises(UsageError, match=f"a {type(wrong).__name__}.*torch.Tensor"):
            tracked.recorder.record("w", wrong)
    for wrong in (torch.tensor([1.0]), torch.tensor([1], dtype=torch.uint8)):
        tracked.recorder.record("w", wrong)
        with pytest.raises(UsageError, match=str(wrong.dtype)):
            tracked.recorder.flush()


@pytest.mark.parametrize("bad", [-1, NUM_ROWS, 2**40])
def test_an_index_outside_its_table_is_named_and_no_counter_changes(bad):
    tracked = Tracked()
    tracked.report(3)
    tracked.recorder.record("w", torch.tensor([0, bad]))
    with pytest.raises(RowIndexError, match=f"table 'w': index {bad} at position 1"):
        tracked.recorder.flush()
    assert tracked.counts() == {"w": {}, "fused": {}}


def test_indices_that_are_not_contiguous_count():
    tracked = Tracked()
    tracked.recorder.record("w", torch.arange(10).reshape(2, 5).T)
    tracked.recorder.record("w", torch.arange(10)[::3])
    assert tracked.counts()["w"] == {row: 2 if row in (0, 3, 6, 9) else 1 for row in range(10)}


def test_a_source_is_not_heard_while_noting_is_paused_or_after_detach():
    tracked = Tracked()
    with tracked.recorder.paused():
        with tracked.recorder.paused():
            tracked.report(1)
        tracked.report(1)
    tracked.report(2, 2, 5)
    tracked.report(5)
    assert tracked.counts() == {"w": {}, "fused": {2: 2, 5: 2}}
    assert tracked.recorder.num_lookups == 4
    tracked.recorder.detach()
    assert tracked.source.note is None


def test_many_lookups_without_a_step_do_not_keep_all_their_indices(monkeypatch):
    monkeypatch.setattr("cpr_ext.tracking.lookup_recorder._MAX_PENDING_LOOKUPS", 10)
    tracked = Tracked()
    for _ in range(50):
        tracked.report(1, 2, 3, 4)
    assert tracked.recorder._pending_lookups <= 10
    assert tracked.counts()["fused"] == dict.fromkeys((1, 2, 3, 4), 50)


def test_a_step_is_being_made_from_the_first_report_of_a_source_on():
    tracked = Tracked()
    tracked.recorder.record("w", torch.tensor([1]))
    assert not tracked.recorder.is_mid_step
    tracked.report(1)
    assert tracked.recorder.is_mid_step
    tracked.recorder.flush()
    assert tracked.recorder.is_mid_step
    tracked.recorder.begin_step()
    assert not tracked.recorder.is_mid_step
    tracked.report(1)
    tracked.recorder.forget()
    assert not tracked.recorder.is_mid_step
    assert tracked.counts() == {"w": {1: 1}, "fused": {1: 1}}  # what was counted before forget()


def test_step_reports_a_bad_index_and_does_not_count_the_step(tmp_path):
    weight = torch.zeros(NUM_ROWS, 2)
    with cpr_ext.Checkpointer(torch.nn.Module(), [], tmp_path, tables={"b": weight}) as ckpt:
        ckpt.record_lookups("b", torch.tensor([NUM_ROWS]))
        with pytest.raises(RowIndexError, match=f"'b': index {NUM_ROWS}"):
            ckpt.step()
        assert ckpt.step_count == 0
        ckpt.step()
        assert ckpt.step_count == 1
