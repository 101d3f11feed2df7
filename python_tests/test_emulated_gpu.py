"""The Checkpointer as a whole with tables on a GPU, which is emulated: the tests that hold it to
its promises on the CPU, run again (python_tests/emulated_gpu.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "files",
    [
        [
            "emulated_cases",
            "saving/emulated_gathering",
            "saving/test_snapshot",
            "test_checkpointer",
        ],
        ["recovery/test_recoverer", "recovery/test_mixed_precisions", "saving/test_failed_saves"],
    ],
    ids="-".join,
)
def test_promises_hold_for_tables_on_a_gpu(files):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "python_tests.emulated_gpu"),
            *("-q", *(f"python_tests/{file}.py" for file in files)),
            *("-p", "no:cacheprovider", "-p", "no:xdist"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CPR_EXT_HYPOTHESIS": "sanitize"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    launched = int(done.stdout.rsplit("kernels launched:", 1)[1])
    assert launched > 100, "the tests did not use the emulated device"
