"""Keyed tables through a Checkpointer: no row returns under another id."""

import warnings

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext import StoreOptions
from cpr_ext.errors import (
    SnapshotError,
    SnapshotFailedWarning,
    StoreError,
    UntrackedChangeWarning,
    UsageError,
)
from cpr_ext.recovery.restore import read_dense
from python_tests.helpers import flip
from python_tests.keyed_job import DIM, SLOTS, TABLE, KeyedJob

EXACT = {"priority": cpr_ext.AllRows()}
NO_REBASE = {"store": StoreOptions(None)}


def trained(directory, num_steps, **options):
    job = KeyedJob(directory, **options)
    job.train(num_steps)
    return job


def resumed(directory, *, seed=1, recovery=(), **options):
    """Another process's job, and the report of its recovery."""
    job = KeyedJob(directory, seed=seed, **options)
    return job, job.ckpt.recover(**dict(recovery))


def save(job, kind="partial"):
    saved = job.ckpt.save(kind)
    job.ckpt.wait()
    return saved


@pytest.mark.parametrize("scores", [False, True])
def test_a_full_recovery_continues_bit_for_bit(tmp_path, scores):
    options = {**EXACT, "scores": scores}
    trained(tmp_path / "a", 33, **options).end()
    again, report = resumed(tmp_path / "a", recovery={"mode": "full"}, **options)
    assert (report.step, report.rows_stale) == (31, 0)
    if scores:  # else the map does not know which id was used last
        again.train(9)
        job = trained(tmp_path / "b", 40, **options)
        assert torch.equal(job.map.key, again.map.key)
        assert torch.equal(job.weight, again.weight)


def test_a_snapshot_that_fails_leaves_its_slots_to_the_next(tmp_path):
    job = trained(tmp_path, 7, **NO_REBASE)
    bias = job.model[1].bias.data
    bias.fill_(float("nan"))
    failed = job.ckpt.save()
    with pytest.warns(SnapshotFailedWarning, match="holds NaN"):
        job.ckpt.save()
    assert failed.state == "failed"
    bias.fill_(0.0)
    with pytest.warns(SnapshotFailedWarning, match="holds NaN"):
        job.ckpt.save()
    job.end()
    assert resumed(tmp_path)[0].rows().keys() == job.keys_at[7]


def test_keys_that_are_wrong_fail_the_snapshot_by_name(tmp_path):
    job = trained(tmp_path, 6, save_at_close=True)
    (first, _), (second, slot), *_ = job.map.slots.items()
    for wrong, message in ((-7, f"slot {slot} has key -7"), (first, f"the same key {first}")):
        job.map.key[slot] = wrong
        job.ckpt.save()
        with pytest.warns(SnapshotFailedWarning, match=message):
            job.ckpt.step()
    job.map.key[slot] = second
    save(job)
    job.train(1)
    first, second, *_ = job.map.slots.values()
    job.map.key[second] = job.map.key[first]
    with pytest.warns(SnapshotFailedWarning, match="the same key"):
        with pytest.raises(SnapshotError, match="the same key"):
            job.ckpt.close()


def test_keys_and_scores_that_were_replaced_by_others_fail_the_snapshot_by_name(tmp_path):
    job = trained(tmp_path, 6, scores=True, **EXACT)
    slots = job.ckpt.tables[0].slots
    key, used = slots.key, slots.scores["used"]
    slots.scores["used"] = torch.zeros(60, 2, dtype=torch.int64)
    job.ckpt.save()
    with pytest.warns(SnapshotFailedWarning, match=r"'items' has keys and scores .* at the start"):
        job.ckpt.step()
    slots.key = torch.full((61,), -1)
    job.ckpt.save()
    told = r"'key': \(\(61,\), torch.int64\).* at the start"
    with pytest.warns(SnapshotFailedWarning, match=told):
        job.ckpt.step()
    slots.key, slots.scores["used"] = key.clone(), used  # another tensor of the same form
    slots.key[int(job.map.slots.popitem()[1])] = 10**13
    save(job)
    job.ckpt.step()
    job.end()
    again, _ = resumed(tmp_path, scores=True)
    assert torch.equal(again.map.key, slots.key)


def test_what_is_no_key_column_is_refused():
    weight = nn.Parameter(torch.zeros(4, 2))
    for keys, message in (
        (torch.zeros(4), "keys are torch.float32"),
        (torch.zeros(4, dtype=torch.uint64), "Map larger ids to int64"),
        (torch.zeros(3, dtype=torch.int64), "one row for each of the 4 slots"),
        (torch.zeros(4, 1, dtype=torch.int64), "needed: int64 of shape"),
        ({1: 2}, "keys is a dict"),
    ):
        with pytest.raises(UsageError, match=message):
            cpr_ext.Table("t", weight, keys=keys)


def test_slots_that_the_table_does_not_have_are_refused_before_anything_is_written(tmp_path):
    job = KeyedJob(tmp_path)
    for table, slots, message in (
        (TABLE, torch.tensor([SLOTS]), f"has {SLOTS} rows; given: {SLOTS} to {SLOTS}"),
        (TABLE, torch.tensor([-1]), "given: -1 to -1"),
        (TABLE, torch.tensor([0.5]), "rows are torch.float32"),
        ("other", torch.tensor([0]), "no table 'other'; there are: items"),
    ):
        with pytest.raises(UsageError, match=message):
            with job.ckpt.writing_rows(table, slots):
                raise AssertionError("it was entered")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("gap", [1, 2])
def test_slots_count_as_given_whatever_becomes_of_their_tensor(tmp_path, gap, dtype):
    job = trained(tmp_path, 7, **EXACT)
    save(job, "base")
    slots = torch.arange(SLOTS, dtype=dtype)[::gap]
    with job.ckpt.writing_rows(TABLE, slots):
        job.weight.data[slots] = 7.0  # PyTorch counts no such write
        slots.zero_()
    assert job.ckpt.check() == {}
    save(job)
    job.end()
    again, _ = resumed(tmp_path, recovery={"mode": "full"}, **EXACT)
    assert torch.equal(again.weight, job.weight)


def uncounted(job, monkeypatch):
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(job.ckpt._watch, "count_rows", None)
        with pytest.raises(TypeError, match="not callable"):
            with job.ckpt.writing_rows(TABLE, torch.tensor([1])):
                job.weight[1] = 7.0


def without_a_word(job, _):
    with torch.no_grad():
        job.weight[3] = 1.0


def state_replaced(job, _):
    with job.ckpt.writing_rows(TABLE, torch.tensor([1])):
        job.optimizer.state[job.weight]["sum"] = job.state + 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (uncounted, "'items'"),
        (without_a_word, "'items'"),
        (state_replaced, "'items'.*state was replaced"),
    ],
)
def test_what_is_written_and_not_counted_leaves_all_rows_changed(
    tmp_path, monkeypatch, change, told
):
    job = trained(tmp_path, 7)
    change(job, monkeypatch)
    with pytest.warns(UntrackedChangeWarning, match=told):
        job.train(1)
    job.end()


def test_a_store_with_keys_and_a_model_without_do_not_go_together(tmp_path):
    trained(tmp_path / "keyed", 6).end()
    with pytest.raises(StoreError, match=r"has keys \['key'\], the model None"):
        KeyedJob(tmp_path / "keyed", keyed=False)
    other = KeyedJob(tmp_path / "other", keyed=False)
    with pytest.raises(StoreError, match=r"has keys \['key'\], the model \[\]"):
        other.ckpt.recover(from_store=tmp_path / "keyed")
    scored = KeyedJob(tmp_path / "scored", scores=True)
    before = scored.weight.clone()
    report = scored.ckpt.recover(from_store=tmp_path / "keyed", strict=False)
    assert "the model ['key', 'key.used']" in report.differences[0]
    assert torch.equal(scored.weight, before)


@pytest.mark.parametrize("scores", [False, True])
def test_after_damage_no_key_has_two_slots_and_none_a_row_of_another(tmp_path, scores):
    emptied = older = 0
    options = {**NO_REBASE, "scores": scores, "num_slots": 24}
    for seed in range(4):
        store = tmp_path / str(seed)
        job = KeyedJob(store, **options)
        job.train(37 + 5 * seed, new_ids=5)
        job.end()
        path = job.ckpt.store.path_of(job.ckpt.store.manifest.rows[-1 - seed % 2])
        flip(path, path.stat().st_size - 200)  # of a row: the header comes first
        again, report = resumed(store, **options)
        rows, held = again.rows(), again.map.key[again.map.key >= 0]
        assert len(held) == len(rows) == len(again.map.slots)
        assert job.foreign(rows) == []
        emptied += report.rows_of_other_ids
        older += report.rows_damaged
        again.train(10, new_ids=5)
        again.end()
        assert resumed(store, seed=2, **options)[1].rows_of_other_ids == 0
    assert emptied > 0
    assert older > emptied


def test_lost_shards_of_a_live_model_take_no_key_that_another_slot_has(tmp_path):
    job = trained(tmp_path, 41, num_shards=3, **NO_REBASE)
    moved = int(job.map.key[0])  # its id gets a slot in another shard, that of 5 others are new
    save(job, "base")
    job.map.key[0], job.map.key[SLOTS - 1] = 10**13, moved
    live = job.map.key.clone()
    job.map.key[: SLOTS // 3] = -1
    with torch.no_grad():
        job.weight[: SLOTS // 3] = float("nan")
    report = job.ckpt.recover(shards=[0])
    assert report.rows_of_other_ids == 1
    assert job.map.key[0] == -1
    assert job.weight[0].tolist() == [0.0] * DIM
    assert torch.equal(job.map.key[1:], live[1:])
    assert job.map.slots[moved] == SLOTS - 1
    assert not job.weight.isnan().any()
    job.train(5)
    job.end()


def test_keys_that_are_a_buffer_of_the_model_are_saved_with_rows_alone(tmp_path):
    job = KeyedJob(tmp_path)
    job.model.register_buffer("ids", job.map.key)
    job.train(6)
    job.end()
    reader = job.ckpt.store.view()
    assert "ids" not in read_dense(reader, reader.newest()).tree()["model"]
    again = KeyedJob(tmp_path, seed=1)
    again.model.register_buffer("ids", again.map.key)
    again.ckpt.recover()
    assert again.rows().keys() == job.keys_at[6]


@pytest.mark.parametrize("scores", [False, True])
def test_each_row_of_a_segment_has_eight_bytes_more_for_each_key_and_score(tmp_path, scores):
    options = {"priority": cpr_ext.AllRows(0.1), "num_slots": 1000, **NO_REBASE}
    job = KeyedJob(tmp_path, scores=scores, **options)
    job.train(43, new_ids=25)
    job.end()
    reader = job.ckpt.store.view()
    partial = [record for record in reader.manifest.rows if record.kind == "partial"]
    assert len(partial) == 8
    for record in partial:
        (rows,) = reader.open(record).layout.tables
        assert rows.num_rows >= 125  # those with a new id, of five steps
        row_bytes = 8 + 2 * 4 * DIM + 8 + 8 * scores  # row id, weight, sum, key
        assert record.file_bytes - record.header_bytes == rows.num_rows * row_bytes


def test_points_of_keyed_tables_are_complete(tmp_path):
    options = {**EXACT, "scores": True}
    job = KeyedJob(tmp_path, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for num_steps in (7, 4):
            job.train(num_steps)
            assert save(job).is_complete
            job.train(1)
            assert job.ckpt.check() == {}  # new keys are no write past PyTorch
    job.weight.data[5, 0] += 1
    with pytest.warns(UntrackedChangeWarning, match="row 5 counts as unchanged"):
        assert job.ckpt.check() == {TABLE: 5}
    job.end()
    again, report = resumed(tmp_path, **options)
    assert report.step == 12
    assert again.ckpt.check() == {}
    again.train(1)
    # Rows that were not saved since are the restored ones, keys included.
    assert save(again).is_complete
