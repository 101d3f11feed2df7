"""The loops of docs/frameworks.md: killed, recovered, equal bit for bit to one that was not."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import cpr_ext
from cpr_ext.errors import SnapshotError, SnapshotFailedWarning, UsageError
from cpr_ext.wings.proving import prove
from python_tests import loops
from python_tests.wings.proving.conftest import run_preloaded


@pytest.mark.parametrize("name", loops.LOOPS)
def test_a_killed_loop_goes_on_bit_for_bit_as_one_that_was_not(monkeypatch, name):
    monkeypatch.setattr(prove, "run_process", run_preloaded)
    proof = prove.prove(loops.__file__, [name], steps=8)
    assert proof.is_proven, str(proof)


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
    assert ckpt.store.manifest.dense[-1].last_step == 1
