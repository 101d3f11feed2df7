"""``os.fork()``: the lock and the threads stay with the parent; the child's object is inert."""

import os

from python_tests.helpers import run_python

PARENT = """
import os, signal, subprocess, sys, time
import torch
import cpr_ext
from cpr_ext.errors import UsageError
from cpr_ext.storage.store import Store

torch.set_num_threads(1)
store = sys.argv[1]
model = torch.nn.EmbeddingBag(300_000, 16, sparse=True)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
ckpt = cpr_ext.Checkpointer(
    model, optimizer, store, schedule=cpr_ext.EverySteps(1)
)

def train(steps, forward_only=False):
    for _ in range(steps):
        model(torch.randint(0, 300_000, (64, 4))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not forward_only:
            ckpt.step()

def in_child(action):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # a child that hangs is killed
        try:
            action()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(7)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

train(3)  # the capture thread is at work on a snapshot
begun = ckpt._saver.in_flight
"""


def run(code, *arguments):
    return run_python(PARENT + code, *arguments)


def test_a_child_is_told_whose_the_object_is_and_nothing_hangs(tmp_path):
    told = run(
        """
def leave():
    with ckpt:
        pass

def fail_inside():
    with ckpt:
        raise RuntimeError("its own")

assert in_child(ckpt.close) == 0
assert in_child(leave) == 0
assert in_child(ckpt.store.close) == 0
assert in_child(fail_inside) == 7
assert in_child(lambda: train(3, forward_only=True)) == 0  # hooks do not wait for threads
for action in (ckpt.step, ckpt.save, ckpt.wait, ckpt.recover, begun.wait_until_done,
               ckpt.store.require_in_place):
    assert in_child(action) == 7
print(os.getpid())
train(3)
ckpt.wait()
ckpt.close()
""",
        tmp_path / "store",
    ).splitlines()
    assert told[0] == "RuntimeError its own"
    pid = told[-1]
    assert len(told) == 8
    for line in told[1:-1]:
        assert line.startswith("UsageError this "), line
        assert f"belongs to process {pid}; this is process " in line


OPEN = """
import sys, torch, cpr_ext
from cpr_ext.errors import StoreError
model = torch.nn.EmbeddingBag(300_000, 16, sparse=True)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
try:
    ckpt = cpr_ext.Checkpointer(model, optimizer, sys.argv[1])
except StoreError as error:
    print(error)
else:
    print("step", ckpt.recover().step)
    ckpt.close()
"""


def test_the_lock_ends_with_the_process_that_took_it_though_a_child_lives_on(tmp_path):
    """As a data loader's worker does that outlives a killed trainer."""
    store = tmp_path / "store"
    told = run(
        """
ckpt.wait()
child = os.fork()
if child == 0:
    os.close(1), os.close(2)
    time.sleep(120)
    os._exit(0)
assert in_child(lambda: ckpt.store.close()) == 0  # a child cannot give it back
asked = subprocess.run([sys.executable, "-c", sys.argv[2], store], capture_output=True, text=True,
                       env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
print(os.getpid(), child, asked.stdout, asked.stderr[-500:] if asked.returncode else "", flush=True)
os._exit(0)  # at once, and without closing anything
""",
        store,
        OPEN,
    )
    pid, child, message = told.split(" ", 2)
    try:
        assert f"is being written by process {pid}; end it" in message
        assert run_python(OPEN, store).startswith("step ")
        os.kill(int(child), 0)  # it was there all the time
    finally:
        os.kill(int(child), 9)
