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

accelerate = pytest.importorskip("accelerate", reason="needs Accelerate: pip install accelerate")

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
NUM_STEPS, KILLED_AFTER = 16, 13  # of which 11 are saved
SCRIPT = """
import sys
from python_tests.integrations.test_accelerate import train
train(sys.argv[1], is_killed=sys.argv[2] == "killed")
"""


def train(directory, *, is_killed):
    """A rank, or all there is; what DistributedDataParallel replicates is saved as dense part."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    accelerator = accelerate.Accelerator(cpu=True)
    rank, size = accelerator.process_index, accelerator.num_processes
    model = nn.Sequential(nn.EmbeddingBag(50, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    with cpr_ext.Checkpointer(
        model,
        optimizer,
        f"{directory}/{rank}",
        tables=[] if size > 1 else None,
        priority=cpr_ext.AllRows(),
        schedule=cpr_ext.EverySteps(5, when_busy="wait"),
        state={"scheduler": scheduler},
    ) as ckpt:
        report = recover_together(ckpt) if size > 1 else ckpt.recover()
        print(f"rank {rank} begins at {report.step}", flush=True)
        while ckpt.step_count < NUM_STEPS:
            generator = torch.Generator().manual_seed(size * ckpt.step_count + rank)
            rows = torch.randint(0, 50, (8, 3), generator=generator)
            optimizer.zero_grad()
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            scheduler.step()
            ckpt.step(num_samples=8 * size)
            if is_killed and rank == size - 1 and ckpt.step_count == KILLED_AFTER:
                ckpt.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        end = accelerator.unwrap_model(model).state_dict(), scheduler.get_last_lr()
        torch.save(end, f"{directory}/end.pt")


@pytest.mark.parametrize(("launcher", "killed"), [([], -signal.SIGKILL), (TORCHRUN, 1)])
def test_processes_of_which_one_is_killed_end_bit_for_bit_as_others(tmp_path, launcher, killed):
    for name, life, expected in (
        ("whole", "whole", (0, {"0"})),
        ("killed", "killed", (killed, {"0"})),
        ("killed", "again", (0, {"11"})),
    ):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "rank.py").write_text(SCRIPT)
        done = subprocess.run(
            [sys.executable, *launcher, str(directory / "rank.py"), str(directory), life],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        begun = set(re.findall(r"rank \d begins at (\d+)", done.stdout))
        assert (done.returncode, begun) == expected, done.stderr
    ends = [torch.load(tmp_path / name / "end.pt") for name in ("whole", "killed")]
    torch.testing.assert_close(*ends, rtol=0, atol=0)
