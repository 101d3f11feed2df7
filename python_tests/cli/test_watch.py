"""``cpr watch``: a running job in a terminal, in a pipe, and as JSON."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest
import torch

import cpr_ext
from cpr_ext.storage.job_stores import worker_directory
from cpr_ext.tools import maintenance
from python_tests.helpers import flip


class Job:
    def __init__(self, directory):
        torch.manual_seed(0)
        self.model = torch.nn.EmbeddingBag(100, 4, sparse=True)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.ckpt = cpr_ext.Checkpointer(
            self.model,
            self.optimizer,
            directory,
            schedule=cpr_ext.EverySteps(10**6),
            save_at_close=False,
        )

    def save(self, kind=None, steps=1):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.tensor([[3]])).sum().backward()
            self.optimizer.step()
            self.ckpt.step(num_samples=16)
        self.ckpt.save(kind) if kind else self.ckpt.save()
        self.ckpt.wait()


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "store")
    yield job
    job.ckpt.close()


def test_a_store_without_a_snapshot_has_none(job, tmp_path, cpr):
    (standing,) = maintenance.watch(tmp_path / "store")
    assert (standing.snapshot, standing.committed_at, standing.trouble) == (0, None, None)
    code, out, _ = cpr("watch", tmp_path / "store", "--once")
    assert code == 0
    assert out.splitlines()[1].split() == ["store", *"------", "0", "B"]


def test_the_newest_snapshot_is_shown(job, tmp_path, cpr):
    job.save("base", steps=3)
    job.save("partial", steps=2)
    (standing,) = maintenance.watch(tmp_path / "store")
    newest = job.ckpt.store.dense.segments[-1]
    assert (standing.snapshot, standing.step, standing.num_samples) == (newest.snapshot, 5, 80)
    assert standing.full_step == max(
        r.last_step for r in job.ckpt.store.dense.segments if r.is_complete
    )
    assert standing.committed_at == pytest.approx(
        (tmp_path / "store/dense/MANIFEST.json").stat().st_mtime
    )
    code, out, _ = cpr("watch", tmp_path / "store", "--once")
    assert code == 0
    cells = re.split(r"\s{2,}", out.splitlines()[1])
    assert cells[:3] == ["store", str(newest.snapshot), "5"]
    assert cells[3].endswith("s ago")


def test_a_damaged_store_hides_no_other_and_a_missing_one_is_named(tmp_path, cpr):
    for rank in (0, 1):
        job = Job(worker_directory(tmp_path / "job", rank, 3))
        job.save("base")
        job.ckpt.close()
    flip(worker_directory(tmp_path / "job", 1, 3) / "dense/MANIFEST.json", 5)
    first, second, third = maintenance.watch(tmp_path / "job")
    assert (first.worker, first.step, first.trouble) == (0, 1, None)
    assert second.trouble is not None
    assert "MANIFEST.json" in second.trouble
    assert (third.worker, third.trouble) == ("worker-00002-of-00003", "the store is missing")
    code, out, _ = cpr("watch", tmp_path / "job", "--once")
    assert code == 1
    assert "worker-00002-of-00003: the store is missing" in out


def test_a_store_is_late_by_its_own_interval_or_by_the_one_that_is_given(job, tmp_path, cpr):
    job.save("base", steps=3)
    job.save("partial", steps=2)
    store, now = job.ckpt.store, time.time()
    manifest = store.dense.directory / "MANIFEST.json"
    files = map(store.shards[0].path_of, store.shards[0].segments)
    for path, age in zip((*files, manifest), (160, 100, 100), strict=True):
        os.utime(path, (now - age, now - age))
    (standing,) = maintenance.watch(tmp_path / "store")
    assert standing.interval_seconds == pytest.approx(60)
    for options, code, is_late in (
        ((), 0, False),
        (("--late-after", 50), 1, True),
        (("--late-after", 500), 0, False),
    ):
        found, out, _ = cpr("watch", tmp_path / "store", "--once", "--json", *options)
        assert (found, json.loads(out)["stores"][0]["is_late"]) == (code, is_late)
    os.utime(manifest, (now - 200, now - 200))
    code, out, _ = cpr("watch", tmp_path / "store", "--once")
    assert (code, ", late" in out) == (0, True)


def test_a_job_that_has_not_begun_is_waited_for(tmp_path):
    store = tmp_path / "store"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start(store, "--json", "--every", 0.1, **streams) as watched:
        assert "waiting for one" in watched.stderr.readline()
        job = Job(store)
        job.save("base")
        while _snapshot(watched.stdout.readline()) == 0:
            pass
        watched.send_signal(signal.SIGINT)
        watched.communicate(timeout=60)
        assert watched.wait(60) == 0
    job.ckpt.close()


def test_a_folder_of_something_else_is_not_waited_for(tmp_path, cpr):
    (tmp_path / "notes").write_text("no store")
    code, _, error = cpr("watch", tmp_path, "--every", 0.1)
    assert code == 1
    assert "is not a cpr_ext store" in error


def start(*arguments, **streams):
    command = [sys.executable, "-m", "cpr_ext.cli", "watch", *map(str, arguments)]
    return subprocess.Popen(command, env={**os.environ, "COLUMNS": "200"}, **streams)


def test_each_change_is_one_line_of_json_until_ctrl_c(job, tmp_path):
    job.save("base", steps=3)
    watched = start(tmp_path / "store", "--json", "--every", 0.1, stdout=subprocess.PIPE, text=True)
    with watched:
        seen = [watched.stdout.readline()]
        job.save(steps=2)
        newest = job.ckpt.store.dense.segments[-1].snapshot
        while _snapshot(seen[-1]) != newest:  # a line also for each manifest on the way
            seen.append(watched.stdout.readline())
        watched.send_signal(signal.SIGINT)
        seen += watched.stdout.readlines()
        assert watched.wait(60) == 0
    assert all(one != other for one, other in pairwise(seen))
    snapshots = list(map(_snapshot, seen))
    assert snapshots[0] < newest
    assert snapshots == sorted(snapshots)


def _snapshot(line):
    return json.loads(line)["stores"][0]["snapshot"]


def test_a_terminal_is_drawn_over(job, tmp_path):
    job.save("base", steps=3)
    ours, theirs = pty.openpty()
    watched = start(tmp_path / "store", "--every", 0.1, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown, has_drawn = bytearray(), threading.Event()

    def read():
        while True:
            try:
                shown.extend(os.read(ours, 4096))
            except OSError:  # the terminal is gone
                return
            if b"\x1b[2F\x1b[J" in shown and shown.count(b"worker") >= 2:
                has_drawn.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert has_drawn.wait(120)
    watched.send_signal(signal.SIGINT)
    assert watched.wait(60) == 0
    reader.join()
    os.close(ours)


def test_a_store_that_goes_away_ends_it_with_its_reason(job, tmp_path):
    job.save("base")
    copy = shutil.copytree(tmp_path / "store", tmp_path / "copy")
    watched = start(copy, "--every", 0.1, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with watched:
        watched.stdout.readline()
        shutil.rmtree(copy)
        assert watched.wait(120) == 1
        assert str(copy) in watched.stderr.read() + watched.stdout.read()


def test_the_size_of_the_world_is_refused_for_one_store(job, tmp_path, cpr):
    for command in ("watch", "inspect", "verify"):
        code, _, err = cpr(command, tmp_path / "store", "--world-size", 2)
        assert code == 1
        assert "is one store, not a job of 2 workers: leave out --world-size" in err
