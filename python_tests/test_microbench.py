"""The microbenchmarks run at tiny sizes, and each states what it moved."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAGES = {"count", "select", "gather", "checksum", "write", "read", "scatter"}


def test_every_stage_is_measured_with_its_rows_bytes_and_speed(tmp_path):
    file = tmp_path / "results.json"
    command = [sys.executable, "-m", "pytest", "bench/micro", "--tiny", "-q"]
    command += ["-p", "no:xdist", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base")]
    command += ["--benchmark-max-time=0.01", "--benchmark-min-rounds=1"]
    result = subprocess.run(
        [*command, f"--benchmark-json={file}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        # A worker of xdist sets variables for its children.
        env={key: value for key, value in os.environ.items() if "PYTEST" not in key},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    benchmarks = json.loads(file.read_text())["benchmarks"]
    assert {each["group"] for each in benchmarks} == STAGES | {"snapshot", "recovery"}
    for each in benchmarks:
        info = each["extra_info"]
        assert info["stage"] == each["group"]
        assert info["rows"] > 0
        assert info["bytes"] >= info["rows"]
        assert info["GB/s"] > 0
