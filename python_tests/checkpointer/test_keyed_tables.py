"""Keyed tables through a Checkpointer: no row returns under another id."""

import warnings
from contextlib import nullcontext

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
from cpr_ext.tracking.key_watch import KeyWatch
from python_tests.keyed_job import DIM, SLOTS, TABLE, KeyedJob

PRIORITIES = {
    "mfu": cpr_ext.MostFrequentlyUsed(),
    "ssu": cpr_ext.SubSampledUsed(),
    "scar": cpr_ext.LargestChange(),
    "all": cpr_ext.AllRows(0.25),
}


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("priority", PRIORITIES)
def test_a_partial_recovery_gives_each_id_a_row_of_its_own(tmp_path, priority, num_shards):
    options = {
        "priority": PRIORITIES[priority],
        "num_shards": num_shards,
        "store": StoreOptions(None),
    }
    job = KeyedJob(tmp_path, **options)
    job.train(43)
    job.end()
    assert job.map.num_evicted > 40
    again = KeyedJob(tmp_path, seed=1, **options)
    report = again.ckpt.recover()
    rows = again.rows()
    assert (report.step, report.rows_of_other_ids) == (41, 0)
    assert rows.keys() == job.keys_at[41]
    assert job.foreign(rows) == []
    assert {key: again.map.slots[key] for key in rows} == again.map.slots
    again.train(9)
    again.end()


def test_without_its_must_save_slots_a_partial_recovery_has_other_keys(tmp_path, monkeypatch):
    none = torch.empty(0, dtype=torch.int64).numpy()
    monkeypatch.setattr(KeyWatch, "must_save", lambda *_: none)
    options = {"store": StoreOptions(None)}
    job = KeyedJob(tmp_path, **options)
    job.train(43)
    job.end()
    again = KeyedJob(tmp_path, seed=1, **options)
    again.ckpt.recover()
    assert again.rows().keys() != job.keys_at[41]
    assert job.foreign(again.rows()) == []
    again.end()


@pytest.mark.parametrize("scores", [False, True])
def test_a_full_recovery_continues_bit_for_bit(tmp_path, scores):
    options = {"priority": cpr_ext.AllRows(), "scores": scores}
    job = KeyedJob(tmp_path / "a", **options)
    job.train(33)
    job.end()
    again = KeyedJob(tmp_path / "a", seed=1, **options)
    report = again.ckpt.recover(mode="full")
    assert report.step == 31
    assert report.rows_stale == 0
    if scores:  # else the map does not know which id was used last
        again.train(9)
        job = KeyedJob(tmp_path / "b", **options)
        job.train(40)
        assert torch.equal(job.map.key, again.map.key)
        assert torch.equal(job.weight, again.weight)
        job.end()
    again.end()


def test_slots_with_another_key_are_saved_before_all_others(tmp_path):
    fraction = cpr_ext.MostFrequentlyUsed(1 / SLOTS)
    job = KeyedJob(tmp_path, priority=fraction, store=StoreOptions(None))
    job.train(6, new_ids=0)
    job.step([*range(5 * 10**12, 5 * 10**12 + 20)])
    job.ckpt.save()
    job.end()
    (record,) = [r for r in job.ckpt.store.manifest.rows if r.last_step == 7]
    (rows,) = job.ckpt.store.view().open(record).layout.tables
    assert rows.num_rows == 20
    again = KeyedJob(tmp_path, seed=1)
    again.ckpt.recover()
    assert again.rows().keys() == job.keys_at[7]
    again.end()


def test_a_snapshot_that_fails_leaves_its_slots_to_the_next(tmp_path):
    job = KeyedJob(tmp_path, store=StoreOptions(None))
    job.train(7)
    with torch.no_grad():
        job.model[1].bias.fill_(float("nan"))
    failed = job.ckpt.save()
    with pytest.warns(SnapshotFailedWarning, match="holds NaN"):
        job.ckpt.save()
    assert failed.state == "failed"
    with torch.no_grad():
        job.model[1].bias.fill_(0.0)
    with pytest.warns(SnapshotFailedWarning, match="holds NaN"):
        job.ckpt.save()
    job.end()
    again = KeyedJob(tmp_path, seed=1)
    again.ckpt.recover()
    assert again.rows().keys() == job.keys_at[7]
    again.end()


def test_keys_that_are_wrong_fail_the_snapshot_by_name(tmp_path):
    job = KeyedJob(tmp_path)
    job.train(6)
    (first, _), (second, slot), *_ = job.map.slots.items()
    for wrong, message in ((first, f"the same key {first}"), (-7, f"slot {slot} has key -7")):
        job.map.key[slot] = wrong
        job.ckpt.save()
        with pytest.warns(SnapshotFailedWarning, match=message):
            job.ckpt.step()
    job.map.key[slot] = second
    job.ckpt.save()
    job.ckpt.wait()
    job.end()


def test_keys_and_scores_that_were_replaced_by_others_fail_the_snapshot_by_name(tmp_path):
    job = KeyedJob(tmp_path, scores=True, priority=cpr_ext.AllRows())
    job.train(6)
    slots = job.ckpt.tables[0].slots
    key, used = slots.key, slots.scores["used"]
    slots.scores["used"] = torch.zeros(60, 2, dtype=torch.int64)
    job.ckpt.save()
    with pytest.warns(SnapshotFailedWarning, match=r"'items' has keys and scores .* at the start"):
        job.ckpt.step()
    slots.key = torch.full((61,), -1)
    job.ckpt.save()
    with pytest.warns(
        SnapshotFailedWarning, match=r"'key': \(\(61,\), torch.int64\).* at the start"
    ):
        job.ckpt.step()
    slots.key, slots.scores["used"] = key.clone(), used  # another tensor of the same form
    slots.key[int(job.map.slots.popitem()[1])] = 10**13
    job.ckpt.save()
    job.ckpt.wait()
    job.ckpt.step()
    job.end()
    again = KeyedJob(tmp_path, seed=1, scores=True)
    again.ckpt.recover()
    assert torch.equal(again.map.key, slots.key)
    again.end()


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
    job.ckpt.close()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("gap", [1, 2])
def test_slots_count_as_given_whatever_becomes_of_their_tensor(tmp_path, gap, dtype):
    job = KeyedJob(tmp_path, priority=cpr_ext.AllRows())
    job.train(7)
    job.ckpt.save("base")
    job.ckpt.wait()
    slots = torch.arange(SLOTS, dtype=dtype)[::gap]
    with job.ckpt.writing_rows(TABLE, slots):
        job.weight.data[slots] = 7.0  # PyTorch counts no such write
        slots.zero_()
    assert job.ckpt.check() == {}
    job.ckpt.save("partial")
    job.end()
    again = KeyedJob(tmp_path, seed=1, priority=cpr_ext.AllRows())
    again.ckpt.recover(mode="full")
    assert torch.equal(again.weight, job.weight)
    again.end()


def test_slots_that_cannot_be_counted_leave_all_rows_changed(tmp_path, monkeypatch):
    job = KeyedJob(tmp_path)
    job.train(7)
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(job.ckpt._watch, "count_rows", None)
        with pytest.raises(TypeError, match="not callable"):
            with job.ckpt.writing_rows(TABLE, torch.tensor([1])):
                job.weight[1] = 7.0
    with pytest.warns(UntrackedChangeWarning, match="'items'"):
        job.train(1)
    job.end()


def test_rows_that_are_written_without_a_word_count_as_changed_as_a_whole(tmp_path):
    job = KeyedJob(tmp_path)
    job.train(1)
    with torch.no_grad():
        job.weight[3] = 1.0
    with pytest.warns(UntrackedChangeWarning, match="'items'"):
        job.train(1)
    job.end()


def test_state_that_is_replaced_while_slots_are_assigned_counts_as_changed(tmp_path):
    job = KeyedJob(tmp_path)
    job.train(7)
    with job.ckpt.writing_rows(TABLE, torch.tensor([1])):
        job.optimizer.state[job.weight]["sum"] = job.state + 1
    with pytest.warns(UntrackedChangeWarning, match="'items'.*state was replaced"):
        job.train(5)
    job.end()


def test_what_changes_in_another_table_is_seen_although_slots_are_assigned(tmp_path):
    bags = nn.ModuleList([nn.EmbeddingBag(8, 2, sparse=True) for _ in range(2)])
    optimizer = torch.optim.Adagrad(bags.parameters(), lr=0.1)
    tables = [
        cpr_ext.Table(f"t{n}", bag.weight, optimizer, [bag], keys=torch.full((8,), -1))
        for n, bag in enumerate(bags)
    ]
    with cpr_ext.Checkpointer(bags, optimizer, tmp_path, tables=tables) as ckpt:

        def train(num_steps):
            for _ in range(num_steps):
                optimizer.zero_grad()
                sum(bag(torch.arange(4)[None]).sum() for bag in bags).backward()
                optimizer.step()
                ckpt.step()

        train(6)
        with torch.no_grad():
            bags[1].weight[3] = 5.0
        with ckpt.writing_rows("t0", torch.tensor([1])), torch.no_grad():
            bags[0].weight[1] = 0.0
        with pytest.warns(UntrackedChangeWarning, match="'t1'"):
            train(1)


def test_a_store_with_keys_and_a_model_without_do_not_go_together(tmp_path):
    job = KeyedJob(tmp_path / "keyed")
    job.train(6)
    job.end()
    with pytest.raises(StoreError, match=r"has keys \['key'\], the model None"):
        KeyedJob(tmp_path / "keyed", keyed=False)
    other = KeyedJob(tmp_path / "other", keyed=False)
    with pytest.raises(StoreError, match=r"has keys \['key'\], the model \[\]"):
        other.ckpt.recover(from_store=tmp_path / "keyed")
    other.ckpt.close()
    scored = KeyedJob(tmp_path / "scored", scores=True)
    before = scored.weight.clone()
    report = scored.ckpt.recover(from_store=tmp_path / "keyed", strict=False)
    assert "the model ['key', 'key.used']" in report.differences[0]
    assert torch.equal(scored.weight, before)
    scored.ckpt.close()


def test_another_number_of_shards_takes_the_rows_of_a_keyed_store(tmp_path):
    job = KeyedJob(tmp_path / "old", num_shards=3, store=StoreOptions(None))
    job.train(33)
    job.end()
    again = KeyedJob(tmp_path / "new", num_shards=2, seed=1)
    again.ckpt.recover(from_store=tmp_path / "old")
    assert again.rows().keys() == job.keys_at[31]
    assert job.foreign(again.rows()) == []
    again.train(7)
    again.end()


@pytest.mark.parametrize("scores", [False, True])
def test_after_damage_no_key_has_two_slots_and_none_a_row_of_another(tmp_path, scores):
    emptied = older = 0
    for seed in range(4):
        store = tmp_path / str(seed)
        options = {"store": StoreOptions(None), "scores": scores, "num_slots": 24}
        job = KeyedJob(store, **options)
        job.train(37 + 5 * seed, new_ids=5)
        job.end()
        newest = job.ckpt.store.manifest.rows[-1 - seed % 2]
        flip_byte(job.ckpt.store.path_of(newest))
        again = KeyedJob(store, seed=1, **options)
        report = again.ckpt.recover()
        rows, held = again.rows(), again.map.key[again.map.key >= 0]
        assert len(held) == len(rows)
        assert job.foreign(rows) == []
        assert len(again.map.slots) == len(rows)
        emptied += report.rows_of_other_ids
        older += report.rows_damaged
        again.train(10, new_ids=5)
        again.end()
        third = KeyedJob(store, seed=2, **options)
        assert third.ckpt.recover().rows_of_other_ids == 0
        third.end()
    assert emptied > 0
    assert older > emptied


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[-200] ^= 1  # of a row: the header comes first
    path.write_bytes(content)


def test_lost_shards_of_a_live_model_take_no_key_that_another_slot_has(tmp_path):
    job = KeyedJob(tmp_path, num_shards=3, store=StoreOptions(None))
    job.train(41)
    lost = range(SLOTS // 3)
    moved = int(job.map.key[0])  # its id gets a slot in another shard, that of 5 others are new
    job.ckpt.save("base")
    job.ckpt.wait()
    job.map.key[0], job.map.key[SLOTS - 1] = 10**13, moved
    live = job.map.key.clone()
    with torch.no_grad():
        for slot in lost:
            job.map.key[slot] = -1
            job.weight[slot] = float("nan")
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
    from cpr_ext.recovery.restore import read_dense

    reader = job.ckpt.store.view()
    assert "ids" not in read_dense(reader, reader.newest()).tree()["model"]
    again = KeyedJob(tmp_path, seed=1)
    again.model.register_buffer("ids", again.map.key)
    again.ckpt.recover()
    assert again.rows().keys() == job.keys_at[6]
    again.end()


def test_a_closed_job_with_wrong_keys_reports_it(tmp_path):
    job = KeyedJob(tmp_path, save_at_close=True)
    job.train(6)
    first, second, *_ = job.map.slots.values()
    job.map.key[second] = job.map.key[first]
    with pytest.warns(SnapshotFailedWarning, match="the same key"):
        with pytest.raises(SnapshotError, match="the same key"):
            job.ckpt.close()


@pytest.mark.parametrize("scores", [False, True])
def test_a_key_column_adds_its_eight_bytes_to_each_row(tmp_path, scores):
    sizes = {}
    for keyed in (False, True):
        job = KeyedJob(tmp_path / str(keyed), keyed=keyed, scores=scores, store=StoreOptions(None))
        if not keyed:
            job.ckpt.writing_rows = lambda *_: nullcontext()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UntrackedChangeWarning)
            job.train(1)
        job.end()
        reader = job.ckpt.store.view()
        first = reader.manifest.rows[0]
        sizes[keyed] = reader.open(first).layout.bytes_by_precision()
    arrays = 2 if scores else 1
    assert sum(sizes[True].values()) - sum(sizes[False].values()) == 8 * SLOTS * arrays


def test_points_of_keyed_tables_are_complete(tmp_path):
    options = {"priority": cpr_ext.AllRows(), "scores": True}
    job = KeyedJob(tmp_path, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for num_steps in (7, 4):
            job.train(num_steps)
            saved = job.ckpt.save()
            job.ckpt.wait()
            assert saved.is_complete
            job.train(1)
            assert job.ckpt.check() == {}  # new keys are no write past PyTorch
    job.weight.data[5, 0] += 1
    with pytest.warns(UntrackedChangeWarning, match="row 5 counts as unchanged"):
        assert job.ckpt.check() == {TABLE: 5}
    job.end()
    again = KeyedJob(tmp_path, seed=1, **options)
    assert again.ckpt.recover().step == 12
    assert again.ckpt.check() == {}
    again.train(1)
    saved = again.ckpt.save()
    again.ckpt.wait()
    assert saved.is_complete  # rows that were not saved since are the restored ones, keys included
    again.end()


@pytest.mark.parametrize("scores", [False, True])
def test_a_partial_snapshot_has_eight_bytes_more_per_row_for_each_key_and_score(tmp_path, scores):
    options = {"priority": cpr_ext.AllRows(0.1), "store": StoreOptions(None)}
    job = KeyedJob(tmp_path, num_slots=1000, scores=scores, **options)
    job.train(43, new_ids=25)
    job.end()
    reader = job.ckpt.store.view()
    partial = [record for record in reader.manifest.rows if record.kind == "partial"]
    assert len(partial) == 8
    plain = 8 + 2 * 4 * DIM  # row id, weight, sum
    for record in partial:
        (rows,) = reader.open(record).layout.tables
        assert rows.num_rows >= 125  # those with a new id, of five steps
        size = record.file_bytes - record.header_bytes
        assert size == rows.num_rows * (plain + 8 + 8 * scores)
