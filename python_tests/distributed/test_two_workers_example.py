"""The example of docs/distributed.md, started as users start it, loses a worker and goes on."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpr_ext.wings.tools.worker_proofs import prove_workers

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "cpr_ext.wings.cli", "launch", "--nproc", "2"]


@pytest.mark.long
def test_a_killed_worker_goes_back_to_its_store_and_the_job_ends_well(tmp_path):
    job = subprocess.Popen(
        [*LAUNCH, ROOT / "examples/two_workers.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        while not (line := job.stdout.readline()).startswith("step  100"):
            assert line, job.stderr.read()
        [lock] = tmp_path.glob("ckpts/worker-00001-*.lock")
        os.kill(int(lock.read_text().split()[0]), signal.SIGKILL)
        printed, said = job.communicate(timeout=240)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, said
    assert "step  350" in printed
    [lost] = re.findall(r"worker 0 resumes after step \d+ .* (\d+) samples lost", said)
    assert int(lost) < 100 * 256  # less than from the start: it was read from its store


def test_the_job_goes_on_bit_for_bit_if_all_workers_are_killed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    proof = prove_workers(str(ROOT / "examples/two_workers.py"), (), 2, steps=2)
    assert proof.is_proven, str(proof)
    assert "all 2 processes trained 2 steps, and again with kills after step 1" in str(proof)
    assert list(tmp_path.iterdir()) == []
