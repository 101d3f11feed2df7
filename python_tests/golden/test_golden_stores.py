"""Stores of every format version, made by the release that introduced it, are read exactly."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import cpr_ext
from cpr_ext.storage.checksummed_json import FORMAT_VERSION
from cpr_ext.wings.tools.maintenance import export, inspect, read_rows, verify
from python_tests.golden.make_store import arrays_of, build, dense_of, open_store, train
from python_tests.helpers import assert_same

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.glob("version-*"))


@pytest.fixture(params=VERSIONS)
def golden(request, tmp_path):
    """A copy, as recovery takes locks."""
    shutil.copytree(HERE / request.param, tmp_path / "golden")
    return tmp_path / "golden"


def test_there_is_a_golden_store_of_each_version_up_to_this_one():
    assert [f"version-{version}" for version in range(1, FORMAT_VERSION + 1)] == VERSIONS


def test_recovery_is_exact_and_training_goes_on(golden):
    expected = json.loads((golden / "expected.json").read_text())
    model, optimizers = build(3)
    with open_store(model, optimizers, golden / "store") as ckpt:
        report = ckpt.recover()
        assert (report.step, report.num_samples) == (expected["step"], expected["num_samples"])
        assert (report.rows_stale, report.damaged_segments) == (None, [])  # they do not say
        assert_same(arrays_of(ckpt), load_file(golden / "rows.safetensors"))
        assert_same(dense_of(model), load_file(golden / "dense.safetensors"))
        assert torch.rand(3).tolist() == expected["next_draw"]
        assert report.state["reader"]["epoch"] == 3
        assert report.state["reader"]["seen"].tolist() == [0, 1, 2, 3, 4]
        train(model, optimizers, ckpt, 2)


def test_the_full_recovery_point_is_there(golden):
    model, optimizers = build(3)
    with open_store(model, optimizers, golden / "store") as ckpt:
        assert ckpt.recover(mode="full").step == 1


def test_it_can_be_recovered_into_another_store(golden):
    model, optimizers = build(3)
    with cpr_ext.Checkpointer(model, optimizers, golden / "new", num_shards=3) as ckpt:
        ckpt.recover(from_store=golden / "store")
        assert_same(arrays_of(ckpt), load_file(golden / "rows.safetensors"))


def test_the_tools_read_it(golden):
    assert verify(golden / "store").is_sound
    assert len(inspect(golden / "store").tables) == 2
    rows = load_file(golden / "rows.safetensors")
    found = read_rows(golden / "store", "films", range(70))
    assert_same(found.arrays["weight"], rows["films/weight"])
    export(golden / "store", golden / "out")
    exported = load_file(golden / "out" / "model.safetensors")
    assert_same(exported["users.weight"], rows["users/weight"])
    exported_rows = load_file(golden / "out" / "optimizer_rows.safetensors")
    assert_same(exported_rows["films.weight.exp_avg"], rows["films/exp_avg"])
