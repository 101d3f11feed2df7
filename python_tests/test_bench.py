"""The benchmarks run, at tiny sizes, so that they cannot rot."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_benchmark_runs_at_a_tiny_size_and_compares_with_a_peer() -> None:
    result = subprocess.run(
        [sys.executable, "bench/run.py", "--tiny"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "x the fastest peer" in result.stdout
    assert "kept in" not in result.stdout
