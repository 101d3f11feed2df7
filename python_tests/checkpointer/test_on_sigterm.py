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


LOADING = """
import os, subprocess, sys, time, torch, cpr_ext
from torch.utils.data import DataLoader
class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 20
    def __getitem__(self, index):
        time.sleep(0.05 if index > 40 else 0.0)  # from then on training waits for it
        return torch.tensor([index % 500, index % 7])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.EmbeddingBag(500, 4, sparse=True), torch.nn.Dropout(0.5))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
options = {"schedule": cpr_ext.EverySteps(1000), "on_sigterm": "save"}
step = 0
def state():
    return step, model[0].weight.sum().item(), torch.get_rng_state().sum().item()
try:
    with cpr_ext.Checkpointer(model, optimizer, sys.argv[1], **options) as checkpointer:
        checkpointer.recover()
        step = checkpointer.step_count
        print("from", *state(), flush=True)
        if sys.argv[2] == "read":
            os._exit(0)
        for batch in DataLoader(Items(), batch_size=4, num_workers=2):
            model(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            after = state()
            if step == int(sys.argv[3]):
                children = [child.pid for child in torch.multiprocessing.active_children()]
                told = {  # by another process, as a worker takes its parent's signal for an end
                    "group": f"kill -- -{os.getpid()}",
                    "one by one": f"kill {' '.join(map(str, children))}; sleep 0.3",
                }[sys.argv[2]]
                subprocess.Popen(f"{told}; kill {os.getpid()}", shell=True, process_group=0)
                time.sleep(0.1)
            checkpointer.step(4)
except SystemExit:
    print("last", *after, flush=True)
    raise
"""


def life(store, how="save", *more, program=PROGRAM):
    command = [sys.executable, "-W", "ignore", "-c", program, str(store), how, *map(str, more)]
    options = {"capture_output": True, "text": True, "timeout": 250}
    done = subprocess.run(command, **options, start_new_session=True)
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


# Batches are there, or training waits for them.
@pytest.mark.parametrize(("how", "at"), [("group", 5), ("group", 15), ("one by one", 15)])
def test_all_is_saved_whichever_workers_of_a_loader_die(how, at, tmp_path):
    code, said, log = life(tmp_path / "store", how, at, program=LOADING)
    # The signal to the parent may come when its interpreter has ended: then the system has it.
    assert code in ((143, -15) if how == "one by one" else (143,)), log
    assert "saved, training ends" in log
    assert int(said[-1].split()[1]) >= at
    _, again, log = life(tmp_path / "store", "read", program=LOADING)
    assert again == [said[-1].replace("last", "from")], log


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


def test_who_hears_of_children_is_called_once_though_several_listen_or_chain_it():
    heard, before = [], signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, lambda number, frame: heard.append("first"))
    both = [Termination("save"), Termination("save")]
    [each.listen() for each in both]
    assert not any(each.is_due() for each in both * 2)
    chained = signal.getsignal(signal.SIGCHLD)  # as torch does with its first loader

    def later(number, frame):
        heard.append("later")
        if len(heard) > 3:
            raise RuntimeError(f"a worker is killed by signal: {signal.strsignal(signal.SIGTERM)}")
        chained(number, frame)

    signal.signal(signal.SIGCHLD, later)
    assert not any(each.is_due() for each in both * 2)
    os.kill(os.getpid(), signal.SIGCHLD)
    assert heard == ["later", "first"]
    heard += ["", ""]
    os.kill(os.getpid(), signal.SIGCHLD)
    assert all(each.is_due() for each in both)
    [each.close() for each in reversed(both)]
    signal.signal(signal.SIGCHLD, before)
