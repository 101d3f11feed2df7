"""A Checkpointer whose store is copied to object storage while it trains."""

import json
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import cpr_ext
from cpr_ext import StoreOptions
from cpr_ext.wings.cli.app import run
from cpr_ext.wings.remote import RemoteOptions, local_store, remote_copy
from cpr_ext.wings.remote.remote_state import newest_state
from python_tests.helpers import Trained, assert_same

SMALL = {"big": (60, 4), "small": (3, 2)}
OPTIONS = {
    "schedule": cpr_ext.EverySteps(10**9),
    "staging": cpr_ext.StagingOptions(slot_bytes=1 << 16),
    "num_shards": 2,
}


MEMORY = RemoteOptions("memory:///")


def begin(directory, seed=0, remote=MEMORY):
    trained = Trained(directory, SMALL, seed=seed, store=StoreOptions(remote=remote), **OPTIONS)
    trained.report = trained.checkpointer.recover()
    return trained


def train_and_save(trained):
    trained.train(2)
    trained.checkpointer.save()
    trained.checkpointer.wait()
    submitted(trained)


def submitted(trained):
    """Wait until the copy has taken note of the newest commit, which it does after the waiters."""
    trained.checkpointer._saver._parts.committer.call(lambda: None).result(30)


def until(is_so):
    """Wait for another thread."""
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def close_and_lose(trained):
    """What a machine leaves that is lost after a close: the state that recovery must give."""
    trained.checkpointer.close()
    directory = trained.store.directory
    local = Trained(directory, SMALL, seed=5, **OPTIONS)
    local.checkpointer.recover()
    rows = local.rows()
    local.die()
    shutil.rmtree(directory)
    return rows


def test_training_goes_on_while_the_service_is_down(objects, tmp_path):
    trained = begin(tmp_path / "a")
    copy = trained.checkpointer.store.origin
    assert copy.wait(30)
    objects.is_down = True
    train_and_save(trained)
    assert not copy.wait(0.1)
    status = trained.checkpointer.remote_status()
    assert status.step == -1
    assert status.lag_bytes > 0
    assert status.lag_seconds > 0
    assert trained.checkpointer.metrics.remote_lag_bytes > 0
    assert trained.checkpointer.metrics.failed_snapshots == 0
    train_and_save(trained)
    objects.is_down = False
    assert copy.wait(30)
    assert trained.checkpointer.remote_status().step == 4
    assert trained.checkpointer.metrics.remote_lag_bytes == 0
    trained.checkpointer.close()


def test_a_copy_that_lags_is_reported_again_and_again(objects, tmp_path, monkeypatch, caplog):
    seconds = [0.0]
    monkeypatch.setattr(remote_copy, "_now", lambda: seconds[0])
    trained = begin(tmp_path / "a")
    assert trained.checkpointer.store.origin.wait(30)

    def reports():
        """How often it was reported that the copy lags."""
        return [r.getMessage() for r in caplog.records if "remote store lags" in r.getMessage()]

    seconds[0] += 2 * remote_copy.WARN_SECONDS
    train_and_save(trained)
    assert trained.checkpointer.store.origin.wait(30)
    assert reports() == []  # it was copied, and lagged at no time
    objects.is_down = True
    train_and_save(trained)
    for number in range(1, 4):
        seconds[0] += 0.9 * remote_copy.WARN_SECONDS
        train_and_save(trained)
        assert len(reports()) == number - 1
        seconds[0] += 0.2 * remote_copy.WARN_SECONDS
        train_and_save(trained)
        until(lambda expected=number: len(reports()) == expected)
    assert re.search(r"it has step 2, this store step 1[46]; since 1980 s, \d{3,} b", reports()[-1])
    assert "503 Slow Down" in reports()[-1]
    objects.is_down = False
    assert trained.checkpointer.store.origin.wait(30)
    seconds[0] += 2 * remote_copy.WARN_SECONDS
    train_and_save(trained)
    assert len(reports()) == 3
    trained.checkpointer.close()


def test_an_old_machine_that_comes_back_is_told(objects, tmp_path, caplog):
    old = begin(tmp_path / "a")
    train_and_save(old)
    assert old.checkpointer.store.origin.wait(30)
    new = begin(tmp_path / "b", seed=9)
    assert new.report.step == 2
    train_and_save(old)
    assert not old.checkpointer.store.origin.wait(30)
    assert old.checkpointer.remote_status().is_fenced
    assert "another process" in caplog.text
    train_and_save(old)  # training goes on
    train_and_save(new)
    new.checkpointer.close()
    assert newest_state(objects).step == 4
    old.checkpointer.close()
    with pytest.raises(cpr_ext.StoreError, match="trained on its own"):
        begin(tmp_path / "a")
    assert newest_state(objects).step == 4


def test_copying_keeps_to_its_bandwidth_and_close_ends_it(objects, tmp_path, caplog):
    remote = RemoteOptions("memory:///", bytes_per_second=1.0, wait_at_close_seconds=0.01)
    trained = begin(tmp_path / "a", remote=remote)
    train_and_save(trained)
    trained.checkpointer.close()
    assert "lacks the newest state" in caplog.text
    assert newest_state(objects) is None or newest_state(objects).step < 2


class OneByOne:
    """A writer that shows what it copies, and waits in between."""

    newest = None

    def __init__(self):
        self.copied, self.proceed = [], threading.Event()

    def copy(self, state):
        self.copied.append(state)
        assert self.proceed.wait(10)

    def missing_bytes(self, state):
        return 0


def test_a_copy_is_let_go_without_a_lock_and_copies_what_it_was_given(monkeypatch):
    """A finalizer does it, on a thread that may hold any lock."""
    monkeypatch.setattr(remote_copy, "close_at_exit", lambda copy, thread: None)
    writer = OneByOne()
    copy = remote_copy.RemoteCopy(writer)
    copy.on_commit("a")
    deadline = time.monotonic() + 10
    while not writer.copied and time.monotonic() < deadline:
        time.sleep(0.001)
    with ThreadPoolExecutor(1) as other:
        with copy._changed:
            other.submit(copy.let_go).result(5)
        copy.on_commit("b")
        writer.proceed.set()
    copy._thread.join(10)
    assert not copy._thread.is_alive()
    assert writer.copied == ["a", "b"]


ADDRESSES = ("s3://bucket/run#1", "s3://bucket/a%2Fb", "s3://bucket/a\nb", "s3://bucket/a\tb")
ADDRESSES += ("s3://bucket/a\\b", "s3://bucket/job ", "s3://bucket//job", "s3://bucket/../job")
ADDRESSES += ("s3://bucket/./job", "file:///tmp/x/../y")


def test_secrets_are_not_shown_and_an_address_that_a_parser_would_change_is_refused():
    options = RemoteOptions("s3://bucket/job", config={"aws_secret_access_key": "hush"})
    assert "hush" not in repr(options)
    for address in ("s3://me:hush@bucket/job", "az://account/c?sig=hush"):
        with pytest.raises(cpr_ext.UsageError) as raised:
            RemoteOptions(address)
        assert "hush" not in str(raised.value)
    with pytest.raises(cpr_ext.UsageError, match="s3://"):
        RemoteOptions("runs/a")
    for address in ADDRESSES:
        with pytest.raises(cpr_ext.UsageError, match=r"same place|one place"):
            RemoteOptions(address)


def test_the_tools_take_an_address(tmp_path, monkeypatch, capsys):
    address = f"file://{tmp_path / 'remote'}"
    trained = begin(tmp_path / "a", remote=RemoteOptions(address))
    train_and_save(trained)
    rows = close_and_lose(trained)
    for arguments, expected in [
        (["inspect"], f"{address}: 2 tables"),
        (["verify", "--quiet"], f"{address}: no damage"),
        (["inspect", "--json"], f'"store": "{address}"'),
        (["export", str(tmp_path / "out")], "model.safetensors"),
    ]:
        monkeypatch.setattr("sys.argv", ["cpr", arguments[0], address, *arguments[1:]])
        with pytest.raises(SystemExit) as ended:
            run()
        assert not ended.value.code
        assert expected in capsys.readouterr().out
    (exported,) = json.loads((tmp_path / "out" / "export.json").read_text())["stores"]
    assert exported["store"] == address
    with local_store(address) as directory:
        reader = Trained(directory, SMALL, seed=3, **OPTIONS)
        reader.checkpointer.recover()
        assert_same(reader.rows(), rows)
        reader.die()


def test_a_report_says_where_the_state_came_from_and_how_old_it_was(objects, tmp_path, caplog):
    first = begin(tmp_path / "a")
    assert first.report.source is None
    train_and_save(first)
    first.checkpointer.close()
    again = begin(tmp_path / "a", seed=9)
    assert (again.report.source.kind, again.report.source.place) == (
        *("own store", str(tmp_path / "a")),
    )
    assert 0 <= again.report.source.age_seconds < 600
    again.checkpointer.close()
    path = again.store.path_of(again.store.manifest.newest)
    os.utime(path, (path.stat().st_mtime - 5000,) * 2)
    begin(tmp_path / "a", seed=9).checkpointer.close()  # copies what it finds
    shutil.rmtree(tmp_path / "a")
    new = begin(tmp_path / "b", seed=9)
    assert new.report.source.kind == "copy"
    assert new.report.source.age_seconds > 4000
    assert "was empty: training resumes from the copy" in caplog.text
    assert new.checkpointer.recover().source.kind == "own store"
    new.checkpointer.close()
