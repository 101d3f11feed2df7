"""Hugging Face Accelerate's wrappers, given as they are: killed, recovered, equal bit for bit."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.distributed import recover_together
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
        schedule=cpr_ext.EverySteps(5, when_busy="wait"),
        state={"scheduler": scheduler},
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


RANKS = """
import sys
from python_tests.integrations.test_accelerate import train_a_rank
train_a_rank(sys.argv[1], is_killed=sys.argv[2] == "killed")
"""


def train_a_rank(directory, *, is_killed):
    """Under torchrun; all that DistributedDataParallel replicates is saved as the dense part."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Sequential(nn.EmbeddingBag(50, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    model, optimizer = accelerator.prepare(model, optimizer)
    rank = accelerator.process_index
    with cpr_ext.Checkpointer(
        model,
        optimizer,
        f"{directory}/{rank}",
        tables=[],
        schedule=cpr_ext.EverySteps(5, when_busy="wait"),
    ) as ckpt:
        print(f"rank {rank} begins at {recover_together(ckpt).step}", flush=True)
        while ckpt.step_count < NUM_STEPS:
            generator = torch.Generator().manual_seed(2 * ckpt.step_count + rank)
            rows = torch.randint(0, 50, (8, 3), generator=generator)
            optimizer.zero_grad()
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            ckpt.step(num_samples=16)
            if is_killed and rank == 1 and ckpt.step_count == KILLED_AFTER:
                ckpt.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        torch.save(accelerator.unwrap_model(model).state_dict(), f"{directory}/end.pt")


def torchrun(directory, life):
    directory.mkdir(exist_ok=True)
    script = directory / "rank.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [*command, str(script), str(directory), life],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )
    begun = re.findall(r"rank \d begins at (\d+)", done.stdout)
    return done.returncode, {int(step) for step in begun}, done.stderr


def test_two_ranks_of_which_one_is_killed_end_bit_for_bit_as_others(tmp_path):
    code, begun, error = torchrun(tmp_path / "whole", "whole")
    assert (code, begun) == (0, {0}), error
    code, begun, _ = torchrun(tmp_path / "killed", "killed")
    assert (code, begun) == (1, {0})
    code, begun, error = torchrun(tmp_path / "killed", "again")
    assert (code, begun) == (0, {11}), error
    ends = [torch.load(tmp_path / name / "end.pt") for name in ("whole", "killed")]
    torch.testing.assert_close(*ends, rtol=0, atol=0)
