"""The newest full-recovery point that the stores of all workers have."""

from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from cpr_ext.distributed.common_points import CommonPoints
from cpr_ext.saving.metrics import Metrics
from cpr_ext.storage.retention import Retention
from python_tests.storage import records


class Workers:
    """A CommonPoints each, of one round; what a store has is a list of steps."""

    def __init__(self, *steps, max_bytes=None):
        notes = HashStore()
        self.stores = [FakeStore(Retention(1, max_bytes), each) for each in steps]
        self.all = []
        for rank, store in enumerate(self.stores):
            checkpointer = SimpleNamespace(store=store, metrics=Metrics())
            self.all.append(CommonPoints(checkpointer, rank, steps, notes))

    def look(self, *ranks):
        for _ in range(2):  # what a thread has heard is heeded at the next one
            for rank in ranks:
                self.all[rank].look(is_full=True)
                self.all[rank]._thread.join()

    @property
    def kept(self):
        return [store.keep_from_step for store in self.stores]


class FakeStore:
    keep_from_step = None

    def __init__(self, retention, steps):
        self.retention = retention
        self.save(*steps)

    def save(self, *steps):
        dense = [records.record(step, "dense", is_complete=True, file_bytes=9) for step in steps]
        self.manifest = records.manifest_of(dense)


def test_stores_keep_the_newest_point_that_all_have():
    workers = Workers([], [])
    workers.look(0, 1)
    assert workers.kept == [None, None]
    workers.stores[0].save(1, 2, 3, 4)
    workers.look(0, 1)
    assert workers.kept == [2, None]  # the three that the other may make yet
    workers.stores[0].save(2, 3, 4, 5)
    workers.stores[1].save(2)
    workers.look(1, 0)
    assert workers.kept == [2, 2]
    workers.stores[1].save(2, 4)  # that of step 3 failed
    workers.look(1, 0)
    assert workers.kept == [2, 4]  # the other hears of it with its own next one
    workers.all[1].look(is_full=False)
    assert workers.kept[1] is None


@pytest.mark.parametrize("max_bytes", [None, 100, 30])
def test_who_is_more_than_two_points_behind_is_named_once(caplog, max_bytes):
    workers = Workers([1], [1], [1], max_bytes=max_bytes)
    for end in range(2, 8):
        assert bool(caplog.messages) == (end > 5)
        workers.stores[0].save(*range(1, end))
        workers.stores[2].save(*range(1, end))
        workers.look(1, 0, 2)
    behind, *large = caplog.messages
    assert "workers [1] have made none of the newest 3 full-recovery points known" in behind
    assert "steps 2, 3, 4: see" in behind
    assert len(large) == (2 if max_bytes == 30 else 0)  # each of its own store
    assert workers.kept == [1, 1, 1]
    workers.stores[1].save(1, 6)
    workers.look(1, 0)
    assert workers.kept[1] == 6
    assert len(caplog.messages) == 1 + len(large)


def test_what_a_recovery_has_undone_is_not_missed(caplog):
    workers = Workers([1, 2, 3, 4, 5], [1, 2])
    workers.stores[0].save(1, 2)  # before the first step of the round
    workers.look(0, 1)
    assert caplog.messages == []
    assert workers.kept == [2, 2]
