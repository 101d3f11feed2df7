"""Tools on stores of keyed tables."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import cpr_ext
from cpr_ext.cli.app import app
from cpr_ext.errors import DamageError
from cpr_ext.tools.maintenance import backup, compact, export, inspect, read_rows, repair, verify
from python_tests.keyed_job import SLOTS, TABLE, KeyedJob


@pytest.fixture
def job(tmp_path):
    job = KeyedJob(tmp_path / "store", rebase_after=None, scores=True)
    job.train(37)
    return job.end()


def recovered(store, job):
    """Recover a store; it has the ids of the job's newest snapshot, each with its own row."""
    again = KeyedJob(store, seed=1, scores=True)
    report = again.ckpt.recover()
    again.ckpt.close()
    assert again.rows().keys() == job.keys_at[36]
    assert job.foreign(again.rows()) == []
    return report


def test_inspect_shows_occupancy_and_evictions(job, tmp_path):
    (keys,) = inspect(tmp_path / "store").keys
    assert (keys.table, keys.slots, keys.held) == (TABLE, SLOTS, len(job.keys_at[36]))
    assert keys.evicted == len(job.keys_at[31] - job.keys_at[36]) > 0
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "store")])
    (line,) = [line.split() for line in shown.output.splitlines()[-1:]]
    assert line == [TABLE, str(SLOTS), str(keys.held), str(keys.evicted)]
    as_json = CliRunner().invoke(app, ["inspect", str(tmp_path / "store"), "--json"])
    assert json.loads(as_json.output)["keys"][0]["evicted"] == keys.evicted


def test_an_export_has_the_keys_with_the_rows(job, tmp_path):
    export(tmp_path / "store", tmp_path / "out")
    tensors = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        tensors |= load_file(path)
    (key,) = [values for name, values in tensors.items() if name.endswith(".key")]
    assert set(key[key >= 0].tolist()) == job.keys_at[36]
    rows = read_rows(tmp_path / "store", TABLE, [0, 5])
    assert rows.arrays["key"].tolist() == key[[0, 5]].tolist()


def test_compaction_and_a_backup_keep_each_row_under_its_id(job, tmp_path):
    backup(tmp_path / "store", tmp_path / "backup")
    compact(tmp_path / "store")
    for store in ("store", "backup"):
        verify(tmp_path / store)
        assert recovered(tmp_path / store, job).rows_of_other_ids == 0


def test_a_copy_in_object_storage_has_the_keys(tmp_path):
    address = f"file://{tmp_path}/copy"
    job = KeyedJob(tmp_path / "store", remote=address, rebase_after=None, scores=True)
    job.train(37)
    job.end()
    shutil.rmtree(tmp_path / "store")
    again = KeyedJob(tmp_path / "store", seed=1, remote=address, scores=True)
    again.ckpt.recover()
    again.ckpt.close()
    assert again.rows().keys() == job.keys_at[36]
    assert job.foreign(again.rows()) == []


def test_after_a_repair_no_key_has_two_slots(tmp_path):
    job = KeyedJob(tmp_path / "store", rebase_after=None, num_slots=24)
    job.train(47, new_ids=5)
    job.end()
    path = job.ckpt.store.shards[0].path_of(job.ckpt.store.shards[0].segments[-1])
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


@pytest.mark.parametrize("precision", ["int8", "bfloat16"])
def test_rounded_rows_keep_exact_keys(tmp_path, precision):
    rounded = cpr_ext.Precision(base=precision, partial=precision)
    job = KeyedJob(tmp_path / "store", precision=rounded, rebase_after=None)
    job.train(37)
    job.end()
    again = KeyedJob(tmp_path / "store", seed=1, precision=rounded)
    assert again.ckpt.recover().rows_rounded > 0
    assert again.rows().keys() == job.keys_at[36]
    again.end()


def test_numbers_of_keys_that_are_no_counts_are_damage(job, tmp_path, monkeypatch):
    from cpr_ext.tools.maintenance import inspection

    opened = inspection.open_segment

    def wrong(manifest, record):
        segment = opened(manifest, record)
        segment.metadata["keys"] = {TABLE: {"held": -1, "evicted": torch.inf}}
        return segment

    monkeypatch.setattr(inspection, "open_segment", wrong)
    with pytest.raises(DamageError, match="its numbers of keys are not as written"):
        inspect(tmp_path / "store")
