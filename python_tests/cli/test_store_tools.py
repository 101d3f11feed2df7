import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import cpr_ext
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.tools.maintenance import verify
from python_tests.helpers import flip
from python_tests.tools.maintenance.stores import trained_store


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stores") / "store"
    trained_store(directory).checkpointer.close()
    return directory


@pytest.fixture
def store(made, tmp_path):
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"


def damage(store):
    newest = StoreReader(store).shards[1].segments[-1]
    path = store / "shard-00001" / newest.file
    flip(path, newest.header_bytes + 3)
    return path


def test_inspect_shows_snapshots_shards_and_tables(cpr, store):
    code, out, _ = cpr("inspect", store)
    assert code == 0
    assert f"{store}: 3 shards, 3 tables" in out
    assert "full-recovery point" in out
    assert "tables.big" in out
    assert max(map(len, out.splitlines())) < 120


def test_inspect_shows_how_old_the_rows_of_a_table_are(cpr, store):
    code, out, _ = cpr("inspect", store, "--table", "tables.big")
    assert code == 0
    assert "oldest row" in out
    assert "700 rows of 4 F32" in out


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["inspect"], "points"),
        (["inspect", "--table", "tables.big"], "steps_behind"),
        (["verify"], "is_sound"),
        (["compact"], "bytes_after"),
    ],
)
def test_json_is_one_document(cpr, store, arguments, field):
    code, out, _ = cpr(*arguments[:1], store, *arguments[1:], "--json")
    assert code == 0
    assert field in json.loads(out)


def test_verify_of_a_sound_store_says_so(cpr, store):
    code, out, _ = cpr("verify", store)
    assert code == 0
    assert "no damage; checked" in out


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_verify_exits_1_with_the_names_of_what_is_damaged(cpr, store, json_flag):
    path = damage(store)
    code, out, _ = cpr("verify", store, *json_flag)
    assert code == 1
    assert str(path) in out


def test_export_writes_what_the_library_loads(cpr, store, tmp_path):
    code, out, _ = cpr("export", store, tmp_path / "out", "--format", "safetensors")
    assert code == 0
    assert "of step 13" in out
    assert "tables.big.weight" in load_file(tmp_path / "out" / "model.safetensors")
    code, _, err = cpr("export", store, tmp_path / "out")
    assert code == 2
    assert "exists" in err


def test_compact_merges_and_says_what_became_of_it(cpr, store):
    code, out, _ = cpr("compact", store, "--mb-per-second", "500")
    assert code == 0
    assert "15 segments" in out
    assert "6 segments" in out
    assert verify(store).is_sound
    assert "nothing to merge" in cpr("compact", store)[1]


def test_compact_names_the_process_that_trains_on_the_store(cpr, store):
    trained = trained_store(store, snapshots=0)
    code, _, err = cpr("compact", store)
    trained.checkpointer.close()
    assert code == 1
    assert f"process {os.getpid()}" in err


@pytest.mark.parametrize("command", ["export", "compact"])
def test_damage_ends_a_command_with_1_and_its_name(cpr, store, tmp_path, command):
    path = damage(store)
    code, _, err = cpr(command, store, *([tmp_path / "out"] if command == "export" else []))
    assert code == 1
    assert path.name in err


@pytest.mark.parametrize("command", ["inspect", "verify", "export", "compact"])
def test_a_directory_that_is_no_store_is_one_line_and_exit_1(cpr, tmp_path, command):
    arguments = [tmp_path / "out"] if command == "export" else []
    code, out, err = cpr(command, tmp_path / "nothing", *arguments)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "is not a cpr_ext store" in err


@pytest.mark.parametrize(
    "arguments",
    [["inspect"], ["verify", "a", "b"], ["export", "a", "b", "--format", "x"], ["compact", "--x"]],
)
def test_wrong_usage_exits_2(cpr, arguments):
    code, _, err = cpr(*arguments)
    assert code == 2
    assert "Usage: cpr" in err


def test_publish_waits_for_the_first_snapshot_if_it_is_to_publish_again(made, tmp_path):
    store = tmp_path / "store"
    command = [sys.executable, "-m", "cpr_ext.cli", "publish", str(store), "--to"]
    command += [str(tmp_path / "rows"), "--every", "0.1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as publishing:
        assert publishing.stderr.readline() == f"'{store}' has no snapshot yet: waiting for one\n"
        shutil.copytree(made, tmp_path / "copy")
        (tmp_path / "copy").rename(store)
        assert "all rows for new consumers" in publishing.stdout.readline()
        publishing.send_signal(signal.SIGINT)
        publishing.communicate()


def test_publish_once_does_not_wait(cpr, tmp_path):
    code, _, err = cpr("publish", tmp_path / "store", "--to", tmp_path / "rows")
    assert (code, "no STORE.json" in err) == (1, True)


def test_a_store_without_tables_says_where_all_is(tmp_path, cpr):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cpr_ext.Checkpointer(model, optimizer, tmp_path / "store", tables=[]) as checkpointer:
        checkpointer.save("base")
    code, out, _ = cpr("inspect", tmp_path / "store")
    assert code == 0
    assert "No table is kept by row: all is in the dense part" in out
