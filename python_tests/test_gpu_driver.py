"""tools/gpu.py, which runs all that needs a GPU, with parts and machines that need none."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpr_ext import _emulated, _native

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "tools"
WHOLE = {"python": "3.11", "include": "/usr/include", "has_header": True, "has_gpu": True}


def load(name):
    """A module of tools/, whose scripts find each other by being in one folder."""
    sys.path.insert(0, str(TOOLS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(TOOLS))


gpu, machines, parts_of = load("gpu"), load("gpu_machine"), load("gpu_parts")
Part = parts_of.Part


def a_machine(tools=(), **about):
    return machines.Machine(sys.executable, {**WHOLE, "missing": [], **about}, dict(tools))


def run(out, *parts, minutes=1.0, machine=None):
    outcomes = gpu.run_all(parts, machine or a_machine(), out, minutes)
    return [(outcome.passed, outcome.told) for outcome in outcomes]


# --- parts are run ---


def test_every_part_is_run_and_told_whatever_the_others_do(tmp_path, capsys):
    parts = [
        Part("good", '"$PYTHON" -c \'print("one\\n== 3 passed ==")\'', 30, expects=" passed"),
        Part("bad", "echo oh no >&2; exit 3", 30),
        Part("silent", "echo all skipped", 30, expects=" passed"),
        Part("variable", "test $GIVEN = 7 && echo yes", 30, variables={"GIVEN": "7"}),
    ]
    out = tmp_path / "a folder" / "out"
    assert run(out, *parts) == [
        (True, "3 passed"),
        (False, "exit status 3: oh no"),
        (False, "its output has no ' passed'"),
        (True, "yes"),
    ]
    assert "== bad\n$ echo oh no >&2; exit 3\noh no\n" in (out / "log.txt").read_text()
    table = capsys.readouterr().out.split("part ")[1].splitlines()
    states = ("passed", "failed", "failed", "passed")
    assert [line.split()[:2] for line in table[1:5]] == [
        [part.name, state] for part, state in zip(parts, states, strict=True)
    ]
    kept = json.loads((out / "summary.json").read_text())
    assert [part["passed"] for part in kept["parts"]] == [True, False, False, True]
    assert kept["machine"]["python"] == "3.11"
    assert kept["commit"]


def test_a_part_that_takes_too_long_is_killed_with_what_it_started(tmp_path):
    left = tmp_path / "left"
    hangs = Part("hangs", f"echo started; (sleep 3; touch {left}) & sleep 600", 1)
    begin = time.monotonic()
    assert run(tmp_path, hangs) == [(False, "killed after 1 s: started")]
    assert time.monotonic() - begin < 30
    time.sleep(3)
    assert not left.exists()


def main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    return gpu.main()


def test_the_build_comes_first_and_a_failed_part_is_the_exit_status(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "examine", lambda python, modules: a_machine())
    parts = (Part("build", "echo built", 30), Part("a", "echo yes", 30), Part("b", "exit 4", 30))
    monkeypatch.setattr(gpu, "PARTS", parts)
    assert main(monkeypatch, "--out", str(tmp_path), "a") == 0

    def names():
        kept = json.loads((tmp_path / "summary.json").read_text())
        return [part["name"] for part in kept["parts"]]

    assert names() == ["build", "a"]
    assert main(monkeypatch, "--out", str(tmp_path), "--no-build", "b") == 1
    assert names() == ["build", "a", "b"], "earlier calls are forgotten"
    assert main(monkeypatch, "--out", str(tmp_path), "--no-build", "a", "b") == 1
    assert names() == ["build", "a", "b"]
    monkeypatch.setattr(gpu, "examine", lambda python, modules: a_machine(gpu="another"))
    assert main(monkeypatch, "--out", str(tmp_path), "--no-build", "a") == 0
    assert names() == ["a"]
    shown = capsys.readouterr().out
    assert "b           failed" in shown
    with pytest.raises(SystemExit):
        main(monkeypatch, "c")
    assert "no part is called c; there are build, a, b" in capsys.readouterr().err


# --- the first run on a machine that is lent ---


def first_run(*arguments, python="true"):
    """What the driver is called with; python: succeeds if the core that came along loads."""
    done = subprocess.run(
        ["tools/gpu_first_run.sh", *arguments],
        cwd=ROOT,
        env={**os.environ, "GPU_DRIVER": "echo", "GPU_PYTHON": python},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_three_commands_of_ten_minutes_run_all_parts(tmp_path):
    limits = {part.name: part.limit_seconds for part in parts_of.PARTS}
    run = []
    for command in "123":
        words = first_run(command, str(tmp_path))
        minutes = float(words[words.index("--minutes") + 1])
        names = [word for word in words if word in limits]
        assert "--no-build" in words
        assert sum(limits[name] for name in names) <= 60 * minutes <= 570
        run += names
    assert run[0] == "smoke"
    assert sorted(run) == sorted(set(limits) - {"build"})


# --- of a copy of the tree ---


def test_a_part_runs_from_a_copy_of_the_tree_alone(tmp_path):
    """As on a machine that was sent the tree: no git, no data beside it, nothing installed.

    But for what `gpu_first_run.sh prepare` has put into it.
    """
    tree, out = tmp_path / "tree", tmp_path / "out"
    ignored = shutil.ignore_patterns(".*", "build", "demo_out", "*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=ignored)
    for module in (_native.native, _emulated):
        shutil.copy(module.__file__, tree / "cpr_ext")
    (tree / "cpr_ext.egg-info").mkdir()
    (tree / "cpr_ext.egg-info" / "commit.txt").write_text("abc123\n")
    command = [sys.executable, "tools/gpu.py", "--emulated", "--no-build", "racecheck"]
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [*command, "--out", str(out)], cwd=tree, env=environment, capture_output=True, text=True
    )
    log = out / "log.txt"
    assert done.returncode == 0, done.stdout + (log.read_text() if log.exists() else done.stderr)
    assert " passed" in log.read_text()
    kept = json.loads((out / "summary.json").read_text())
    assert (kept["commit"], len(kept["parts"])) == ("abc123", 1)
