"""What is made for segments on their way from the tables to a file, and back."""

import pytest

import cpr_ext
from cpr_ext.recovery import restore
from cpr_ext.saving import snapshot_rows
from cpr_ext.saving.selection import Selector
from cpr_ext.state.table import Table
from python_tests.helpers import Trained

TABLES = {"a": (200, 4), "b": (70, 4), "c": (90, 4)}


def counted(monkeypatch, place, name):
    calls, real = [], getattr(place, name)

    def call(*args, **options):
        calls.append(args)
        return real(*args, **options)

    monkeypatch.setattr(place, name, call)
    return calls


@pytest.mark.parametrize("kind", ["base", "partial"])
def test_what_is_made_of_a_table_is_made_once_for_all_its_shards(tmp_path, monkeypatch, kind):
    """Else the cost of a snapshot is that of its shards times its tables, not of its bytes."""
    made = {}
    for num_shards in (2, 16):
        run = Trained(
            tmp_path / str(num_shards),
            TABLES,
            num_shards=num_shards,
            schedule=cpr_ext.EverySteps(1000),
            priority=cpr_ext.MostFrequentlyUsed(0.2),
        )
        run.train(2)
        run.checkpointer.wait()
        with monkeypatch.context() as patch:
            calls = [
                counted(patch, Table, "arrays"),
                counted(patch, snapshot_rows, "table_source"),
                counted(patch, Selector, kind),
            ]
            run.checkpointer.save(kind)
            run.checkpointer.wait()
            made[num_shards] = [len(each) for each in calls]
        run.checkpointer.close()
    assert made[2] == made[16]
    assert made[2][1:] == [len(TABLES)] * 2


def test_a_recovery_describes_a_table_once_for_all_segments_of_one_kind(tmp_path, monkeypatch):
    run = Trained(tmp_path, TABLES, num_shards=16, optimizer="sgd")
    run.train(2)
    run.checkpointer.close()
    described = counted(monkeypatch, restore, "native_table")
    Trained(tmp_path, TABLES, num_shards=16, optimizer="sgd").checkpointer.recover()
    of_tables = [arrays for _, _, arrays in described if "weight" in arrays]
    assert len(of_tables) == len(TABLES)
