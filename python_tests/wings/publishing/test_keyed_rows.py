"""Keyed tables at consumers: each key has the row of the store, and evicted ones are gone."""

import runpy
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cpr_ext import StoreOptions
from cpr_ext.errors import DamageError, UsageError
from cpr_ext.wings.publishing import (
    KeyedRows,
    PositionError,
    Subscriber,
    by_key,
    changed_rows,
    publish,
)
from cpr_ext.wings.publishing.keyed_rows import gone_keys
from python_tests.keyed_job import DIM, SLOTS, TABLE, KeyedJob

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/serving.py"


class Dictionary:
    """A consumer that keeps rows by key; it may be cut off at any batch."""

    def __init__(self):
        self.rows, self.held, self.position = {}, {TABLE: torch.full((SLOTS,), -1)}, None

    def follow(self, store, *, cut_off_after=None):
        try:
            self.apply(changed_rows(store, self.position, on_gap="copy"), cut_off_after)
        except PositionError:
            self.apply(changed_rows(store), cut_off_after)

    def apply(self, changes, cut_off_after=None):
        for number, batch in enumerate(by_key(changes, self.held)):
            if number == cut_off_after:
                return
            for at, key in enumerate(batch.keys.tolist()):
                if batch.is_gone:
                    self.rows.pop(key, None)
                else:
                    self.rows[key] = batch.arrays["weight"][at].tolist()
        self.position = changes.until


def recovered(directory, copy, *, states=False, **options):
    """Return what recover() gives of a store: weights by key, or weights and states."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy)
    job = KeyedJob(copy, seed=9, **options)
    job.ckpt.recover()
    job.ckpt.close()
    return {key: row if states else row[0] for key, row in job.rows().items()}


def train_and_publish(job, tmp_path, steps):
    job.train(steps)
    job.ckpt.wait()
    publish(tmp_path / "store", tmp_path / "rows")


def of(keyed):
    held = keyed.key[keyed.key >= 0]
    return dict(zip(held.tolist(), keyed.rows(held).tolist(), strict=True))


def test_after_a_way_back_all_rows_replace_an_update_that_was_cut_off(tmp_path):
    job = KeyedJob(tmp_path / "store", num_shards=2, store=StoreOptions(None))
    job.train(7)
    job.ckpt.wait()
    shutil.copytree(tmp_path / "store", tmp_path / "before")
    consumer = Dictionary()
    consumer.follow(tmp_path / "store")
    for _ in range(2):  # two segments, of a batch each
        job.train(5, new_ids=12)
        job.ckpt.save()
        job.ckpt.wait()
    job.end()
    consumer.follow(tmp_path / "store", cut_off_after=1)
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "before").rename(tmp_path / "store")
    with pytest.raises(
        PositionError, match="were applied in part, and the store has gone back since"
    ):
        consumer.apply(changed_rows(tmp_path / "store", consumer.position))
    consumer.follow(tmp_path / "store")
    assert consumer.rows == recovered(tmp_path / "store", tmp_path / "copy", num_shards=2)


def test_changes_that_do_not_begin_at_the_held_keys_are_refused(tmp_path):
    job = KeyedJob(tmp_path / "store")
    consumer, changes, position = Dictionary(), [], None
    for _ in range(3):
        job.train(10)
        job.ckpt.wait()
        changes.append(changed_rows(tmp_path / "store", position))
        position = changes[-1].until
    consumer.apply(changes[0])
    before = dict(consumer.rows)
    with pytest.raises(
        PositionError, match=r"'items'\] is of snapshot 2, .* since snapshot 4: one"
    ):
        consumer.apply(changes[2])
    assert consumer.rows == before
    consumer.apply(changes[1])
    consumer.apply(changes[1])
    consumer.apply(changes[2])
    with pytest.raises(PositionError, match="one was missed, or comes late"):
        consumer.apply(changes[1])
    assert consumer.rows == recovered(tmp_path / "store", tmp_path / "copy")
    for wrong in (torch.full((SLOTS,), -1.0), torch.full((SLOTS,), -1, dtype=torch.int32), [-1]):
        with pytest.raises(UsageError, match="held has no tensor of 60 keys"):
            list(by_key(changes[0], {TABLE: wrong}))
    job.end()


def test_a_keyed_table_needs_keyed_rows_and_another_one_does_not(tmp_path):
    with pytest.raises(DamageError, match=r"slots \[0, 2\] have the same keys"):
        gone_keys("t", torch.tensor([-1, -1, -1]), torch.tensor([5, -1, 5]))
    job = KeyedJob(tmp_path / "store")
    job.train(6)
    job.end()
    publish(tmp_path / "store", tmp_path / "rows")
    with pytest.raises(UsageError, match=r"'items' is keyed in .* give Subscriber KeyedRows"):
        Subscriber(tmp_path / "rows", {TABLE: torch.zeros(SLOTS, DIM)}).poll()
    with pytest.raises(UsageError, match="held has no tensor of 60 keys for table 'items'"):
        list(by_key(changed_rows(tmp_path / "store"), {}))
    plain = KeyedJob(tmp_path / "plain", keyed=False)
    plain.ckpt.step()
    plain.end()
    publish(tmp_path / "plain", tmp_path / "plain-rows")
    with pytest.raises(UsageError, match="'items' is not keyed in"):
        Subscriber(tmp_path / "plain-rows", {TABLE: KeyedRows(SLOTS, DIM)}).poll()


def test_the_serving_example_runs_with_evictions(tmp_path, capsys):
    job = KeyedJob(tmp_path / "store", store=StoreOptions(None))
    main = runpy.run_path(str(EXAMPLE))["main"]
    arguments = [str(tmp_path / "rows"), "--states", "3", "--pause", "0.01"]
    shown = expected = ""
    before = set()
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(main, arguments)
        for number in range(1, 4):
            train_and_publish(job, tmp_path, 20)
            now = recovered(tmp_path / "store", tmp_path / "copy")
            gone = len(before - now.keys())
            expected += f"items: {len(now)} ids have a row, {gone} have none any more\n"
            while shown.count("none any more") < number:
                assert not served.done() or number == 3
                time.sleep(0.01)
                shown += capsys.readouterr().out
            before = set(now)
        tables = served.result()
    assert gone > 20
    assert "".join(line for line in shown.splitlines(True) if line[:5] == "items") == expected
    assert of(tables[TABLE]) == now
    job.end()
