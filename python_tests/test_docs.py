"""What the documents show is what there is."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from python_tests import preloaded

ROOT = Path(__file__).resolve().parents[1]
HOW_OFTEN = ROOT / "docs/how_often.md"


def test_the_quickstart_runs_and_goes_on_when_it_is_run_again(tmp_path: Path) -> None:
    for _ in range(2):
        result = preloaded.run([ROOT / "examples/quickstart.py"], cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert "step=500" in result.stdout
        assert "rows_restored=25000, rows_stale=0" in result.stdout
        shown = re.search(r"^RecoveryReport.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
        assert shown
        assert re.sub(r"seconds=[\d.e-]+", "", shown[0]) in re.sub(
            r"seconds=[\d.e-]+", "", result.stdout
        )


@pytest.mark.timeout(300)
def test_every_command_of_the_guide_to_intervals_prints_what_it_shows(tmp_path: Path) -> None:
    """Exactly; after a line of three dots but for the numbers."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    blocks = re.findall(r"```\n(\$ .*?\n)```", HOW_OFTEN.read_text(), re.DOTALL)
    commands = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.M)[1:]]
    assert len(commands) == 4
    for part in commands:
        command, _, shown = part.partition("\n")
        done = run_command(command, tmp_path)
        assert done.returncode == 0, done.stdout
        exact, dots, end = shown.partition("...\n")
        if not dots:
            assert done.stdout.rstrip() == exact.rstrip()
        printed = iter(done.stdout.splitlines())  # other threads log in between
        assert [line for line in exact.splitlines() if line not in printed] == []
        # On a busy machine the planner may tell of a new plan behind it.
        assert without_numbers(end) in without_numbers(done.stdout)


def run_command(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    name, *arguments = shlex.split(command)
    python = {"cpr": ["-m", "cpr_ext.wings.cli"], "python": []}
    if name in python:
        return preloaded.run([*python[name], *arguments], cwd=folder, merged=True)
    return subprocess.run([name, *arguments], cwd=folder, capture_output=True, text=True)


def without_numbers(text: str) -> str:
    return re.sub(r"\d[\d.]*", "0", text)
