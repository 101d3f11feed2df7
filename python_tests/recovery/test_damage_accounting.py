"""What damage costs beyond what python_tests/faults/damage.py shows of every byte."""

import pytest
import torch

import cpr_ext
from cpr_ext.errors import DamageError
from python_tests.helpers import Trained, array_offset, assert_same, flip, read_chunks, row_records

NUM_SHARDS = 2
TABLES = {"a": (60, 3)}
OPTIONS = {
    "num_shards": NUM_SHARDS,
    "optimizer": "sgd",
    "schedule": cpr_ext.EverySteps(1, when_busy="wait"),
    "priority": cpr_ext.AllRows(),
}


def test_damage_in_lost_shards_is_reported_in_a_live_model_too(tmp_path):
    """Ranges that do not follow one another share a chunk, which is damaged once."""
    run = Trained(tmp_path, TABLES, lookups=12, **OPTIONS | {"num_shards": 6})
    run.train(3)
    run.checkpointer.wait()
    before = run.rows()["tables.a"]["weight"]
    path = [path for record, path in row_records(run.store) if record.kind == "partial"][-1]
    flip(path, array_offset(path, "tables.a/weight"))
    report = run.checkpointer.recover(shards=[0, 2, 5])
    (damaged,), (chunk,) = report.damaged_segments, read_chunks(path)
    assert (damaged.path, damaged.num_rows) == (path, len(chunk.row_ids))
    is_lost = torch.isin(torch.arange(60) // 10, torch.tensor([0, 2, 5]))
    assert report.rows_stale == int(is_lost[chunk.row_ids].sum()) > 0
    assert_same(run.rows()["tables.a"]["weight"][~is_lost], before[~is_lost])


def test_training_goes_on_when_damage_took_all_per_row_state(tmp_path):
    run = Trained(tmp_path, TABLES, **OPTIONS | {"optimizer": "sparse_adam"})
    run.train(3)
    run.checkpointer.wait()
    run.die()
    paths = [path for _, path in row_records(run.store)]
    for path in paths:
        flip(path, 100)
    fresh = Trained(tmp_path, TABLES, seed=9, **OPTIONS | {"optimizer": "sparse_adam"})
    report = fresh.checkpointer.recover()
    assert (report.step, report.rows_restored, report.rows_missing) == (3, 0, 60)
    assert [(damaged.path, damaged.num_rows) for damaged in report.damaged_segments] == [
        (path, -1) for path in paths
    ]
    fresh.train(1)


def test_without_any_good_dense_part_recovery_says_which_is_damaged_and_changes_nothing(tmp_path):
    run = Trained(tmp_path, TABLES, **OPTIONS)
    run.train(3)
    run.checkpointer.wait()
    run.die()
    for record in run.store.manifest.dense:
        flip(run.store.path_of(record), record.header_bytes + 1)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    fresh = Trained(tmp_path, TABLES, seed=9, **OPTIONS)
    before = fresh.state()
    for mode in ("partial", "full"):
        with pytest.raises(DamageError, match=r"no undamaged dense part is left.*dense\.safe"):
            fresh.checkpointer.recover(mode=mode)
    assert_same(fresh.state(), before)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")} == files


def test_lost_rows_need_neither_the_dense_part_nor_chunks_of_other_rows_to_be_sound(tmp_path):
    staging = cpr_ext.StagingOptions(slot_bytes=64 << 10)
    run = Trained(tmp_path, {"a": (20_000, 8)}, num_shards=2, staging=staging)
    run.train(1)
    run.checkpointer.wait()
    (record,) = run.store.manifest.rows
    flip(run.store.path_of(record), record.file_bytes // 3)  # of row 13,000 or so
    dense = run.store.manifest.dense[-1]
    flip(run.store.path_of(dense), dense.header_bytes + 1)
    with pytest.raises(DamageError, match="-base"):
        run.checkpointer.recover(shards=[0, 1], on_damage="raise")
    report = run.checkpointer.recover(shards=[0], on_damage="raise")
    assert (report.rows_restored, report.damaged_segments) == (10_000, [])
    assert report.bytes_read < 0.6 * record.file_bytes
    run.checkpointer._release()
