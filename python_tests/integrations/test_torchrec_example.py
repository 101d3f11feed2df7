"""The example that users copy, started as they start it, loses a worker and goes on."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
EXAMPLE = [ROOT / "examples/torchrec_dlrm.py", "--rows", "2000", "--store", "stores"]
_WAIT_SECONDS = 400


def start(command, directory):
    return subprocess.Popen(
        list(map(str, command)), cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip


def worker(directory, rank):
    """The process that is worker ``rank`` now, as its lock says."""
    [lock] = directory.glob(f"stores/worker-0000{rank}-*.lock")
    return int(lock.read_text().split()[0])


def losses(printed):
    return {
        int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss (\S+)", printed)
    }


def read_until_step(job):
    """The lines that worker 0 prints, up to the next on a step."""
    read = []
    for line in job.stdout:
        read.append(line)
        if line.startswith("step "):
            return read
    printed, said = job.communicate(timeout=_WAIT_SECONDS)
    pytest.fail(
        f"the job ended ({job.returncode}) before a step:\n{''.join(read)}{printed}\n{said}"
    )


@pytest.mark.parametrize(
    "parity", [pytest.param([], id="partial", marks=pytest.mark.long), ["--parity"]]
)
def test_a_killed_worker_is_replaced_and_the_others_go_on_in_their_processes(tmp_path, parity):
    launch = [BIN / "cpr", "launch", "--nproc", "2", *EXAMPLE, "--steps", "151", *parity]
    job = start(launch, tmp_path)
    try:
        read = read_until_step(job)
        survivor = worker(tmp_path, 0)
        os.kill(worker(tmp_path, 1), signal.SIGKILL)
        read += read_until_step(job)  # worker 0 resumes
        assert worker(tmp_path, 0) == survivor
        printed, said = job.communicate(timeout=_WAIT_SECONDS)
    finally:
        job.kill()
        job.wait()
    printed = "".join(read) + printed
    assert job.returncode == 0, said
    assert losses(printed)[150] < 0.5  # of 0.69 at the start
    if parity:
        assert re.findall(r"after step \d+: (\d+) samples lost", printed) == ["0"], said


def sequence(directory, *command):
    arguments = [*command, ROOT / "examples/torchrec_sequence.py", "--items", "500"]
    return start([*arguments, "--steps", "104", "--store", "stores"], directory)


@pytest.mark.timeout(600)
def test_a_sequence_model_under_torchrun_ends_as_one_that_was_not_killed(tmp_path):
    torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    printed, said = sequence(tmp_path / "whole", *torchrun).communicate(timeout=2 * _WAIT_SECONDS)
    whole = losses(printed)
    assert list(whole) == [50, 100], said
    assert whole[100] < 2  # of 5.9 at the start
    job = sequence(tmp_path / "killed", *torchrun)
    try:
        first = job.stdout.readline()
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        printed, said = job.communicate(timeout=2 * _WAIT_SECONDS)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, said
    assert "exitcode: -9" in said, said
    assert losses(first + printed) == whole  # to eight digits
