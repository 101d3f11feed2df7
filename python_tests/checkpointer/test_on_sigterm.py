"""SIGTERM to a process that trains: the step in flight is the last, and all of it is saved."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cpr_ext
from cpr_ext.runtime.termination import Termination

PROGRAM = """
import os, signal, sys, torch, cpr_ext
torch.manual_seed(0)
model = torch.nn.EmbeddingBag(500, 4, sparse=True)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
before = lambda *given: print("the one before")
signal.signal(signal.SIGTERM, before)
options = {"schedule": cpr_ext.EverySteps(1000)}
if sys.argv[2] != "no":
    options["on_sigterm"] = "save"
with cpr_ext.Checkpointer(model, optimizer, sys.argv[1], **options) as checkpointer:
    report = checkpointer.recover()
    print("from", report.step, model.weight.sum().item())
    while True:
        model(torch.randint(500, (8, 3))).square().sum().backward()
        if checkpointer.step_count == report.step + 6:
            os.kill(os.getpid(), signal.SIGTERM)  # amid a step
            if sys.argv[2] == "no":
                break
            if os.fork() == 0:
                is_default = signal.getsignal(signal.SIGTERM) is before
                os._exit(0 if is_default else 1)
            assert os.wait()[1] == 0
        optimizer.step()
        optimizer.zero_grad()
        if checkpointer.step_count == report.step + 6:
            print("last", checkpointer.step_count + 1, model.weight.sum().item(), flush=True)
        checkpointer.step(8)
"""


def life(store, how="save"):
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(store), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_the_next_life_resumes_after_the_last_step_with_all_rows(tmp_path):
    lives = [life(tmp_path / "store") for _ in range(2)]
    for code, _, log in lives:
        assert code == 143, log
    said, again = (said for _, said, _ in lives)
    assert said[0].startswith("from 0")
    assert again[0] == said[1].replace("last", "from")
    assert again[1].startswith("last 14")
    code, said, log = life(tmp_path / "other", "no")  # a signal is the user's
    assert code == 0, log
    assert said[-1] == "the one before"


@pytest.fixture
def made(tmp_path):
    model = torch.nn.EmbeddingBag(50, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda **options: cpr_ext.Checkpointer(model, optimizer, tmp_path / "s", **options)


def test_closing_gives_the_signal_back(made):
    before = signal.getsignal(signal.SIGTERM)
    with made(on_sigterm="save"):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(ValueError, match="the user's"), made(on_sigterm="save"):
        raise ValueError("the user's")
    assert signal.getsignal(signal.SIGTERM) == before


def test_another_thread_is_refused(made):
    with ThreadPoolExecutor(1) as other:
        with pytest.raises(cpr_ext.UsageError, match="needs the main thread"):
            other.submit(made, on_sigterm="save").result()


def test_one_of_several_processes_is_refused(made, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    with pytest.raises(cpr_ext.UsageError, match=r"one of 4.*different steps"):
        made(on_sigterm="save")
    made().close()


def test_who_took_the_signal_later_keeps_it():
    before = signal.getsignal(signal.SIGTERM)
    termination = Termination("save")
    termination.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert termination.is_wanted
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    termination.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    signal.signal(signal.SIGTERM, before)
