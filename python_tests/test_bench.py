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


def test_the_comparison_of_what_is_left_when_things_go_wrong_runs(tmp_path: Path) -> None:
    command = [sys.executable, "bench/reliability.py", "--tiny", "--folder", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    kill, flip, torn = (part.splitlines() for part in result.stdout.split("### ")[1:])
    assert "| cpr_ext | 2 | 0 | 0 | 0 |" in kill
    assert "| cpr_ext | 2 | 0 | 0 |" in flip
    assert "| cpr_ext | 2 | 0 | 0 |" in torn
    assert "| torch.save | 0 | 0 | 2 |" in flip
