"""Tools on stores of keyed tables."""

import json

import pytest
import torch
from click.testing import CliRunner

from cpr_ext import StoreOptions
from cpr_ext.errors import DamageError
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.wings.cli.app import app
from cpr_ext.wings.tools.maintenance import inspect, repair
from python_tests.keyed_job import SLOTS, TABLE, KeyedJob


@pytest.fixture
def job(tmp_path):
    job = KeyedJob(tmp_path / "store", store=StoreOptions(None), scores=True)
    job.train(37)
    return job.end()


def test_inspect_shows_occupancy_and_evictions(job, tmp_path):
    (keys,) = inspect(tmp_path / "store").keys
    assert (keys.table, keys.slots, keys.held) == (TABLE, SLOTS, len(job.keys_at[36]))
    assert keys.evicted == len(job.keys_at[31] - job.keys_at[36]) > 0
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "store")])
    (line,) = [line.split() for line in shown.output.splitlines()[-1:]]
    assert line == [TABLE, str(SLOTS), str(keys.held), str(keys.evicted)]
    as_json = CliRunner().invoke(app, ["inspect", str(tmp_path / "store"), "--json"])
    assert json.loads(as_json.output)["keys"][0]["evicted"] == keys.evicted


def test_after_a_repair_no_key_has_two_slots(tmp_path):
    job = KeyedJob(tmp_path / "store", store=StoreOptions(None), num_slots=24)
    job.train(47, new_ids=5)
    job.end()
    path = job.ckpt.store.path_of(job.ckpt.store.manifest.rows[-1])
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)
    repair(tmp_path / "store")
    assert inspect(tmp_path / "store").keys[0].slots == 24
    again = KeyedJob(tmp_path / "store", seed=1, num_slots=24)
    again.ckpt.recover()
    held = again.map.key[again.map.key >= 0]
    assert len(held.unique()) == len(held) == len(again.map.slots)
    assert job.foreign(again.rows()) == []
    again.train(5)
    again.end()


def test_numbers_of_keys_that_are_no_counts_are_damage(job, tmp_path, monkeypatch):
    opened = StoreReader.open

    def wrong(self, record):
        segment = opened(self, record)
        segment.metadata["keys"] = {TABLE: {"held": -1, "evicted": torch.inf}}
        return segment

    monkeypatch.setattr(StoreReader, "open", wrong)
    with pytest.raises(DamageError, match="its numbers of keys are not as written"):
        inspect(tmp_path / "store")
