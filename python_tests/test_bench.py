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


def test_what_saving_costs_training_is_measured_beside_peers(tmp_path: Path) -> None:
    command = [sys.executable, "bench/training_overhead.py", "--tiny", "--rounds", "1"]
    command += ["--seconds", "1", "--every", "0.5", "--only", "step", "--folder", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    none, step = result.stdout.splitlines()[-2:]
    assert none.startswith("none")
    assert step.startswith("step")
    assert int(step.split()[3]) >= 1  # saves


def test_the_comparison_of_what_is_left_when_things_go_wrong_runs(tmp_path: Path) -> None:
    command = [sys.executable, "bench/reliability.py", "--tiny", "--folder", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    kill, flip, torn = (part.splitlines() for part in result.stdout.split("### ")[1:])
    assert "| cpr_ext | 2 | 0 | 0 | 0 |" in kill
    assert "| cpr_ext | 2 | 0 | 0 |" in flip
    assert "| cpr_ext | 2 | 0 | 0 |" in torn
    assert "| torch.save | 0 | 0 | 2 |" in flip


def test_the_time_from_a_kill_to_the_next_step_is_measured_beside_the_usual_restart() -> None:
    command = [sys.executable, "bench/recovery_time.py", "--tiny"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    table = result.stdout.split("SIGKILL to the next trained step")[1]
    live, spare, usual = map(float, table.splitlines()[0].split())
    assert min(live, spare, usual) > 0
    assert "live: at most 3 s without start-up" in table
