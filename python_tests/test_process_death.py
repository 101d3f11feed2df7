"""``kill -9`` at any moment: the next run continues from a committed state."""

import json
import signal

import pytest

from cpr_ext.storage.store_reader import StoreReader
from python_tests.helpers import run_python

CODE = """
import sys
from pathlib import Path
from python_tests import killed_trainer
killed_trainer.main(Path(sys.argv[1]), int(sys.argv[2]))
"""


@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.long)])
def test_trainers_killed_at_random_moments_leave_stores_that_continue(tmp_path, kills):
    told = json.loads(run_python(CODE, tmp_path, kills, timeout_seconds=14 * kills))
    assert told["kills"] >= kills
    # The kills hit training, not only the start of it.
    assert told["before_first_step"] < told["kills"] / 2
    assert sum(durable > 0 for durable in told["durable"]) > told["stores"] / 2


REVOKING = """
import os, signal, sys, warnings
import torch
import cpr_ext

warnings.simplefilter("ignore")
torch.manual_seed(0)
model = torch.nn.ModuleDict({n: torch.nn.Embedding(500, 8, sparse=True) for n in "ab"})
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
ckpt = cpr_ext.Checkpointer(
    model, optimizer, sys.argv[1], priority=cpr_ext.AllRows(), consistency="step",
    schedule=cpr_ext.EverySteps(10**6),
)

def train():
    optimizer.zero_grad()
    (model["a"](torch.tensor([3])).sum() + model["b"](torch.tensor([4])).sum()).backward()
    optimizer.step()
    ckpt.step()

train()
ckpt.save("base")
ckpt.wait()
train()
ckpt.save("partial")
ckpt.wait()
assert [each.is_complete for each in ckpt.store.dense.segments][-1]
model["b"].weight.data[77, 2] += 1  # PyTorch does not count it
scrub = ckpt._saver.claims.scrub
while not ckpt.metrics.rows_changed_unseen:
    scrub._next_slice = 0.0
    train()
os.kill(os.getpid(), signal.SIGKILL)  # right after the step that found it
"""


def test_what_a_step_revoked_is_revoked_when_it_is_killed_right_after(tmp_path):
    run_python(REVOKING, tmp_path / "store", returncode=-signal.SIGKILL)
    newest = StoreReader(tmp_path / "store").dense.segments[-1]
    assert newest.kind == "dense"
    assert not newest.is_complete
