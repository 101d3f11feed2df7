"""tools/mutate.py: what it changes, and that a fault is found by the tests that reach it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULE = '''\
"""A module."""
def largest(values: list[int], start: int = 0) -> int:
    best = start
    for value in values:
        if value > best:
            best = value
    if best < 0:
        raise ValueError(f"{1 + 1}")
    return best
'''
TESTS = """\
from cpr_ext.room.module import largest
def test_largest(): assert largest([1, 3, 2]) == 3
def test_none(): assert largest([]) == 0
"""


@pytest.fixture(scope="module")
def mutate():
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "tools/mutate.py")
    module = sys.modules["mutate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_place_is_changed_at_a_time(mutate):
    found = mutate.mutants("a.py", MODULE.encode())
    assert sorted((m["what"], m["lines"][0], m["text"]) for m in found) == [
        ("bound", 5, "(value >= best)"),
        ("bound", 7, "(best <= 0)"),
        ("condition", 5, "(not (value > best))"),
        ("condition", 7, "(not (best < 0))"),
        ("constant", 2, "1"),
        ("constant", 7, "1"),
        ("no error", 8, "pass"),
        ("result", 9, "return None"),
    ]
    lower = mutate.mutants("a.py", f"import os\n{MODULE}".encode())
    assert {m["key"] for m in lower} == {m["key"] for m in found}


def test_a_mutant_is_run_by_the_tests_that_reach_it(tmp_path):
    for name, text in (
        ("tools/mutate.py", (ROOT / "tools/mutate.py").read_text()),
        ("python_tests/reach.py", (ROOT / "python_tests/reach.py").read_text()),
        ("cpr_ext/__init__.py", ""),
        ("cpr_ext/room/__init__.py", ""),
        ("cpr_ext/room/module.py", MODULE),
        ("python_tests/room/test_module.py", TESTS),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    command = [sys.executable, "tools/mutate.py", "room", "--workers", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1, done.stderr
    assert "room: 6 of 8 killed; survivors:" in done.stdout, done.stdout
    of = json.loads((tmp_path / "build/mutants/room.json").read_text())["mutants"].values()
    verdicts = {(m["what"], m["lines"][0]): (len(m["killers"]), m["ran"]) for m in of}
    assert verdicts == {
        ("bound", 5): (0, 1),  # as good
        ("bound", 7): (1, 2),
        ("condition", 5): (1, 1),
        ("condition", 7): (2, 2),
        ("constant", 2): (1, 2),
        ("constant", 7): (1, 2),
        ("no error", 8): (0, 0),
        ("result", 9): (2, 2),
    }
