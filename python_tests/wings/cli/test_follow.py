"""``cpr inspect --follow`` and ``--late-after``: a running job, in a terminal and for cron."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from python_tests.wings.tools.maintenance.stores import trained_store


@pytest.fixture
def trained(tmp_path):
    trained = trained_store(tmp_path / "store", snapshots=1)
    yield trained
    trained.checkpointer.close()


def follow(store):
    command = [sys.executable, "-m", "cpr_ext.wings.cli", "inspect", str(store), "--follow"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def newest_step(stream):
    """The step of the newest snapshot that is printed next."""
    for line in stream:
        if "newest" in line and "step" not in line:
            return int(line.split()[1])
    raise AssertionError("it has ended")


def test_each_commit_is_printed_until_ctrl_c(trained, tmp_path):
    with follow(tmp_path / "store") as followed:
        assert newest_step(followed.stdout) == trained.checkpointer.step_count
        trained.train(2)
        trained.checkpointer.save()
        trained.checkpointer.wait()
        while newest_step(followed.stdout) != trained.checkpointer.step_count:
            pass  # printed also for a claim that is confirmed meanwhile
        followed.send_signal(signal.SIGINT)
        followed.stdout.read()
        assert followed.wait(60) == 0


def test_a_store_that_goes_away_ends_it_with_its_reason(trained, tmp_path):
    copy = shutil.copytree(tmp_path / "store", tmp_path / "copy")
    with follow(copy) as followed:
        newest_step(followed.stdout)
        shutil.rmtree(copy)
        assert str(copy) in followed.stderr.read()
        assert followed.wait(60) == 1


@pytest.mark.parametrize(("seconds", "code"), [(50, 1), (500, 0)])
def test_a_store_is_late_by_the_age_of_its_last_commit(trained, tmp_path, cpr, seconds, code):
    trained.checkpointer.close()
    then = time.time() - 100
    os.utime(tmp_path / "store/MANIFEST.json", (then, then))
    found, out, error = cpr("inspect", tmp_path / "store", "--late-after", seconds, "--json")
    assert (found, "was committed to 10" in error) == (code, code == 1)
    assert out.startswith("{")
