"""Hugging Face Accelerate's wrappers, given as they are: killed, recovered, equal bit for bit."""

import os
import signal

import pytest
import torch
from torch import nn

import cpr_ext
from python_tests.helpers import run_python

accelerate = pytest.importorskip("accelerate", reason="needs Accelerate: pip install accelerate")

NUM_STEPS, KILLED_AFTER = 16, 13  # of which 11 are saved
CODE = """
import sys
from python_tests.integrations.test_accelerate import train
train(sys.argv[1], is_killed=True)
"""


def train(store, *, is_killed=False):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Sequential(nn.EmbeddingBag(50, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    with cpr_ext.Checkpointer(
        model,
        optimizer,
        store,
        priority=cpr_ext.AllRows(),
        schedule=cpr_ext.EverySteps(5),
        consistency="step",
        when_busy="wait",
        stateful=[scheduler],
    ) as ckpt:
        report = ckpt.recover()
        while ckpt.step_count < NUM_STEPS:
            generator = torch.Generator().manual_seed(ckpt.step_count)
            rows = torch.randint(0, 50, (8, 3), generator=generator)
            optimizer.zero_grad()
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            scheduler.step()
            ckpt.step(num_samples=8)
            if is_killed and ckpt.step_count == KILLED_AFTER:
                ckpt.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    return report, model.state_dict(), scheduler.get_last_lr()


def test_a_killed_loop_ends_bit_for_bit_as_one_that_was_not(tmp_path):
    run_python(CODE, tmp_path / "killed", returncode=-signal.SIGKILL)
    report, *resumed = train(tmp_path / "killed")
    assert 0 < report.step < KILLED_AFTER
    _, *whole = train(tmp_path / "whole")
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
