import shutil
import signal
import subprocess
import sys

import torch

import cpr_ext


def test_publish_waits_for_the_first_snapshot_if_it_is_to_publish_again(store, tmp_path):
    place = tmp_path / "store"
    command = [sys.executable, "-m", "cpr_ext.wings.cli", "publish", str(place), "--to"]
    command += [str(tmp_path / "rows"), "--every", "0.1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as publishing:
        assert publishing.stderr.readline() == f"'{place}' has no snapshot yet: waiting for one\n"
        shutil.copytree(store, tmp_path / "copy")
        (tmp_path / "copy").rename(place)
        assert "all rows for new consumers" in publishing.stdout.readline()
        publishing.send_signal(signal.SIGINT)
        publishing.communicate()


def test_a_store_without_tables_says_where_all_is(tmp_path, cpr):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cpr_ext.Checkpointer(model, optimizer, tmp_path / "store", tables=[]) as checkpointer:
        checkpointer.save("base")
    code, out, _ = cpr("inspect", tmp_path / "store")
    assert code == 0
    assert "No table is kept by row: all is in the dense part" in out
