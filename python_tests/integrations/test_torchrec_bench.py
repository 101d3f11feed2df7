"""The benchmarks of TorchRec jobs run, at a tiny size, so that they cannot rot."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_what_tracking_and_saving_cost_is_measured_beside_torchrecs_tracker():
    command = [sys.executable, "bench/torchrec_overhead.py", "--tiny"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    table = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()[1:]}
    assert list(table) == ["none", "cpr_ext", "tracking", "ModelDeltaTracker"]
    assert all(float(steps_per_second) > 0 for steps_per_second, *_ in table.values())
