"""Buffers around the tables of a TorchRec model are saved and restored."""

import pytest
import torch

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

import cpr_ext
from cpr_ext.integrations.torchrec import make_checkpointer
from python_tests.integrations.sharded_models import PooledDlrm, make_batch, sharded

pytestmark = pytest.mark.usefixtures("alone")
ALL_ROWS = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**6)}


class Counting(torch.nn.Module):
    """Scales what it gets by how often it was called."""

    def __init__(self, persistent):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1), persistent=persistent)

    def forward(self, values):
        self.calls += 1
        return values * (1 + 0.01 * self.calls)


class CountingDlrm(PooledDlrm):
    def __init__(self, persistent):
        super().__init__()
        self.linear = torch.nn.Sequential(self.linear, Counting(persistent))


def start(directory, persistent):
    parallel, optimizer = sharded("row_wise", "sgd", model=CountingDlrm(persistent))
    checkpointer = make_checkpointer(parallel, optimizer, directory, **ALL_ROWS)
    return parallel, optimizer, checkpointer


def train(run, steps):
    parallel, optimizer, checkpointer = run
    for _ in range(steps):
        optimizer.zero_grad()
        parallel(*make_batch(checkpointer.step_count, 0)[0]).backward()
        optimizer.step()
        checkpointer.step()


def calls_of(run):
    return {name: buffer for name, buffer in run[0].named_buffers() if name.endswith("calls")}


@pytest.mark.filterwarnings("ignore")
def test_a_worker_saves_it_and_gives_it_back(tmp_path):
    run = start(tmp_path, persistent=False)
    run[2].session.keep_unsaved_buffers()
    train(run, 3)
    run[2].save("base")
    run[2].close()
    again = start(tmp_path, persistent=False)
    again[2].session.keep_unsaved_buffers()
    assert again[2].recover().is_complete
    (calls,) = calls_of(again).values()
    assert calls.tolist() == [3]
    again[2]._release()


@pytest.mark.filterwarnings("ignore")
def test_one_that_grows_comes_back_as_it_was(tmp_path):
    run = start(tmp_path, persistent=True)
    train(run, 1)
    run[2].model.get_submodule("linear.1").calls = torch.arange(5.0)
    run[2].save("base")
    run[2].close()
    again = start(tmp_path, persistent=True)
    again[2].recover()
    (calls,) = calls_of(again).values()
    assert calls.tolist() == [0, 1, 2, 3, 4]
    again[2]._release()
