"""A program that ends without close(): it ends well, whatever the library's threads are at."""

import gc
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import cpr_ext
from cpr_ext.errors import SnapshotFailedWarning, StoreError
from cpr_ext.saving.background_capture import CaptureThread
from cpr_ext.storage.commit_thread import CommitThread
from python_tests import preloaded
from python_tests.helpers import Trained, build, open_checkpointer, run_python


def run_to_end(code, *arguments):
    """Run ``code`` in a process of its own, however it ends."""
    here = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r})\n"
    return preloaded.run(["-c", here + code, *arguments], timeout=100, cwd="/")


PROGRAM = """
import sys, tempfile
import torch
from torch import nn
import cpr_ext
from cpr_ext.saving import background_capture

torch.set_num_threads(1)
model = nn.EmbeddingBag(300_000, 16, sparse=True)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
if sys.argv[1] == "commit":
    background_capture.OVERLAP_BYTES = sys.maxsize
checkpointer = cpr_ext.Checkpointer(
    model, optimizer, sys.argv[2], schedule=cpr_ext.EverySteps(1, when_busy="wait"),
    priority=cpr_ext.AllRows(),
)
for _ in range(4):
    model(torch.randint(0, 300_000, (64, 4))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.step()
print(checkpointer._saver.in_flight.state)
"""


@pytest.mark.parametrize("at", ["capture", "commit"])
def test_a_program_ends_well_that_does_not_close(tmp_path, at):
    for attempt in range(2):
        told = run_python(PROGRAM, at, tmp_path / f"store{attempt}").strip()
        assert told in ("capturing", "captured", "committed")


INTERRUPTED = """
import os, signal, sys, time
import torch
from cpr_ext.storage.commit_thread import CommitThread

torch.set_num_threads(1)

class Busy(CommitThread):
    def close(self, timeout_seconds=None):
        # From here on somebody presses Ctrl-C again and again.
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        if sys.argv[1] == "first":
            os.kill(os.getpid(), signal.SIGINT)
        super().close(timeout_seconds)
        signal.setitimer(signal.ITIMER_REAL, 0)

def work():  # inside native code nearly all the time
    end = time.monotonic() + 1
    while time.monotonic() < end:
        torch.ones(300, 300) @ torch.ones(300, 300)
    os.write(1, b"done")

committer = Busy()
committer.call(work)
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("when", ["first", "later"])
def test_ctrl_c_while_threads_are_being_ended_does_not_abort(when):
    done = run_to_end(INTERRUPTED, when)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "done"), done.stderr
    assert "terminate called" not in done.stderr


TWICE = """
import os, signal, sys
import torch
import cpr_ext
from cpr_ext.saving import background_capture

if sys.argv[2] == "never":
    background_capture.OVERLAP_BYTES = sys.maxsize
torch.set_num_threads(1)
model = torch.nn.EmbeddingBag(400_000, 16, sparse=True)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
with cpr_ext.Checkpointer(
    model, optimizer, sys.argv[1], schedule=cpr_ext.EverySteps(1), priority=cpr_ext.AllRows(),
) as ckpt:
    ckpt.save("base").wait_until_done()
    for step in range(1000):
        if step == 3:
            again = f"sleep {sys.argv[3]}; kill -INT {os.getpid()}"
            os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", again)
            os.kill(os.getpid(), signal.SIGINT)
        model(torch.randint(0, 400_000, (64, 4))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
"""


@pytest.mark.parametrize("overlap", ["always", "never"])
@pytest.mark.parametrize("seconds", [0.002, 0.02])
def test_a_program_that_is_interrupted_twice_ends_as_one_that_is_interrupted(
    tmp_path, overlap, seconds
):
    for number in range(3):
        done = run_to_end(TWICE, tmp_path / f"store-{number}", overlap, seconds)
        # Two interrupts at one moment can break Python's own threading.Condition; nothing is left.
        if "release unlocked lock" not in done.stderr:
            break
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "KeyboardInterrupt" in done.stderr


def test_an_interrupted_close_keeps_the_lock_and_is_done_by_the_next(tmp_path, monkeypatch):
    others = set(threading.enumerate())  # of tests before this one
    run = Trained(tmp_path / "store")
    run.train(2)
    join = threading.Thread.join

    def interrupt(thread, timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.checkpointer.close()
    with pytest.raises(StoreError, match="is being written by this same process"):
        Trained(tmp_path / "store")
    monkeypatch.setattr(threading.Thread, "join", join)
    run.checkpointer.close()
    left = set(threading.enumerate()) - others
    assert not [thread.name for thread in left if thread.name.startswith("cpr_ext")]
    Trained(tmp_path / "store").checkpointer.close()


@pytest.mark.parametrize("overlap", ["always", "never"])
def test_neither_the_want_of_threads_nor_of_memory_ends_training(tmp_path, monkeypatch, overlap):
    options = {"schedule": cpr_ext.EverySteps(2), "overlap": overlap}
    run = Trained(tmp_path / "store", **options)

    def refuse(*_, **__):
        raise MemoryError

    def refuse_thread(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse_thread)
    run.train(8)
    run.checkpointer.wait()
    monkeypatch.undo()
    assert run.checkpointer.metrics.failed_snapshots == 0
    monkeypatch.setattr("cpr_ext.saving.snapshot_rows.SegmentCapture", refuse)

    def train_until_one_fails():  # a busy machine captures late
        while run.checkpointer.metrics.failed_snapshots == 0:
            assert run.checkpointer.step_count < 100
            run.train(1)

    with pytest.warns(SnapshotFailedWarning):
        train_until_one_fails()
    monkeypatch.undo()
    failed_at = run.checkpointer.step_count
    run.train(4)
    run.checkpointer.wait()
    run.checkpointer.close()  # later snapshots were committed, the next one perhaps of that step
    again = Trained(tmp_path / "store", overlap=overlap)
    assert again.checkpointer.recover().step >= failed_at


@pytest.mark.parametrize("which", [1, 2])
def test_a_checkpointer_that_cannot_have_its_threads_leaves_nothing_behind(
    tmp_path, monkeypatch, which
):
    start, started = threading.Thread.start, []

    def refuse_one(thread):
        started.append(thread)
        if len(started) == which:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_one)
    model, optimizers = build({"a": (50, 4)})
    options = {"overlap": "always"}
    with pytest.raises(RuntimeError, match="can't start new thread"):
        open_checkpointer(model, optimizers, tmp_path / "store", **options)
    monkeypatch.undo()
    assert not model.tables["a"]._forward_pre_hooks
    open_checkpointer(model, optimizers, tmp_path / "store", **options).close()


def threads_of_library():
    return {thread for thread in threading.enumerate() if thread.name.startswith("cpr_ext-")}


def end_soon(threads):
    """Whether they end; a capture in progress keeps its checkpointer alive until it ends."""
    deadline = time.monotonic() + 10
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("at", ["rest", "capture", "commit"])
def test_threads_end_once_a_checkpointer_is_garbage(tmp_path, at):
    gc.collect()
    before = threads_of_library()
    trained = Trained(
        tmp_path / "store",
        {"big": (200_000, 16)},
        schedule=cpr_ext.EverySteps(10**9),
        overlap="always",
    )
    begun = threads_of_library() - before
    names = {thread.name for thread in begun}
    assert names == {"cpr_ext-capture", "cpr_ext-committer"}
    trained.train(1)
    if at != "rest":
        trained.checkpointer.save("base")
    if at == "commit":
        trained.checkpointer.wait()
        trained.train(1)
        trained.checkpointer.save("partial")
    known = weakref.ref(trained.checkpointer)
    del trained
    gc.collect()
    assert known() is None
    assert end_soon(begun)


def test_the_end_of_a_program_waits_for_a_thread_whose_owner_is_gone():
    """It is in the native core, off which the interpreter would tear it, and abort."""
    run_python("""
import threading
import numpy as np
from cpr_ext._native import native
from cpr_ext.runtime.threads import close_at_exit

class Owner:
    def close(self, timeout_seconds=None):
        raise AssertionError("it is gone")

def work():
    for _ in range(3):
        native.top_rows(scores, 1_000_000)
    print("done", flush=True)

scores = np.random.default_rng(0).integers(0, 2**32, 10_000_000, dtype=np.uint32)
thread = threading.Thread(target=work, daemon=True)
close_at_exit(Owner(), thread)
thread.start()
del thread
""")


def test_a_capture_is_ended_without_a_lock_and_paused_after_an_interrupted_resume():
    """A finalizer ends it, on a thread that may hold any lock."""
    with ThreadPoolExecutor(1) as other:
        capture = CaptureThread()
        with capture._changed:
            other.submit(capture.end).result(5)
        assert end_soon([capture._thread])
        capture = CaptureThread()
        capture._work = lambda stop: None  # and here came the interrupt
        other.submit(capture.pause).result(5)
        capture.close(5)
        assert end_soon([capture._thread])


def test_a_committer_without_an_owner_does_first_what_it_was_handed(tmp_path):
    done, proceed = [], threading.Event()
    committer = CommitThread()
    committer.submit(lambda: proceed.wait(10))
    future = committer.call(lambda: done.append("second"))
    known, thread = weakref.ref(committer), committer._thread
    del committer
    gc.collect()
    assert known() is not None  # so that the end of the program waits for it
    proceed.set()
    future.result(10)
    assert end_soon([thread])
    assert done == ["second"]
    assert known() is None
