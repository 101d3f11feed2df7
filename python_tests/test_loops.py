"""The loops of docs/frameworks.md: killed, recovered, equal bit for bit to one that was not."""

import signal

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import cpr_ext
from cpr_ext.errors import SnapshotError, SnapshotFailedWarning, UsageError
from python_tests.helpers import run_python
from python_tests.loops import KILLED_AFTER, LOOPS, NUM_STEPS

CODE = """
import sys
from python_tests.loops import train_all_and_die
train_all_and_die(sys.argv[1])
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("killed")
    run_python(CODE, directory, returncode=-signal.SIGKILL)
    return directory


@pytest.mark.parametrize("name", LOOPS)
def test_a_killed_loop_ends_bit_for_bit_as_one_that_was_not(tmp_path, killed, name):
    (report, resumed, _), *_ = LOOPS[name](killed / name, NUM_STEPS)
    assert 0 < report.step < KILLED_AFTER
    (fresh, whole, _), *_ = LOOPS[name](tmp_path, NUM_STEPS)
    assert fresh.step == 0
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_fsdp_is_refused_by_name(tmp_path):
    model = nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 1))
    model[1].__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})  # as fully_shard() does
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"module '1' is under FSDPModule \(FSDP\)"):
        cpr_ext.Checkpointer(model, optimizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_grows_during_training_fails_each_snapshot_by_name(tmp_path):
    model = nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = cpr_ext.Checkpointer(model, optimizer, tmp_path)
    ckpt.step()
    ckpt.wait()
    model[0].weight = nn.Parameter(torch.zeros(20, 4))
    ckpt.step()
    message = "table '0': its weight was replaced, or has another shape"
    with pytest.warns(SnapshotFailedWarning, match=message):
        with pytest.raises(SnapshotError, match=message):
            ckpt.close()
    assert ckpt.store.dense.segments[-1].last_step == 1
