"""``cpr emulate``, as a person uses it: in processes of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from python_tests import preloaded

SMALL = ["--steps", "40", "--failures", "2", "--pls", "0.2", "--strategy", "cpr-mfu"]


def cpr(*arguments):
    return preloaded.run(["-m", "cpr_ext.wings.cli", *arguments], timeout=240)


def running(marker):
    """Processes whose command line or open files name ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if marker in (entry / "environ").read_bytes().decode(errors="replace"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_it_goes_on_after_kill_9_and_keeps_what_was_finished(tmp_path):
    out = tmp_path / "runs"
    command = [sys.executable, "-m", "cpr_ext.wings.cli", "emulate", *SMALL, "--quiet"]
    command += ["--seeds", "2", "--jobs", "1", "--out", str(out)]
    mark = f"CPR_TEST_MARK={tmp_path}"
    environment = {**os.environ, "CPR_TEST_MARK": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    deadline = time.monotonic() + 200
    while not list(out.glob("runs/*.json")):
        assert time.monotonic() < deadline, "no run was finished"
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("runs/*.json")}
    assert len(kept) < 4
    while running(mark):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)

    again = cpr(*command[3:], "--json")
    assert again.returncode == 0, again.stderr
    files = {path: path.stat().st_mtime_ns for path in out.glob("runs/*.json")}
    assert len(files) == 4
    assert kept.items() <= files.items()  # not played again
    assert not (out / "work").exists()
    told = json.loads(again.stdout)
    assert {(run["strategy"], run["seed"]) for run in told["runs"]} == {
        (strategy, seed) for strategy in ("no-failure", "cpr-mfu") for seed in (0, 1)
    }
    assert len(told["facts"]["commands"]) == 2
    assert told["facts"]["commands"][1]["machine"]["torch"]

    other = cpr("emulate", *SMALL, "--hours", 50, "--out", out)
    assert other.returncode == 2
    assert "scenario.job.total_hours was 56" in other.stderr

    shown = cpr("emulate", *SMALL, "--seeds", 2, "--out", out, "--plot", tmp_path / "a.png")
    assert shown.returncode == 0, shown.stderr
    assert "CPR-MFU" in shown.stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
