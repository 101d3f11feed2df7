"""Growth needs a reason: tools/budget.py counts every source file once, and refuses more."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(folder, *arguments):
    command = [sys.executable, folder / "tools/budget.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def repository(tmp_path, lines, allowed):
    (tmp_path / "tools").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "tools/budget.py").write_text((ROOT / "tools/budget.py").read_text())
    (tmp_path / "tools/budget.toml").write_text(
        f'[source]\nlines = {allowed}\nfolders = ["src/"]\n\n'
        '[tools]\nlines = 1000\nfolders = ["tools/"]\n'
    )
    (tmp_path / "src/a.py").write_text("x = 1\n" * lines)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    return tmp_path


def test_a_part_above_its_budget_fails(tmp_path):
    done = run(repository(tmp_path, lines=11, allowed=10))
    assert done.returncode == 1
    assert "over its budget" in done.stdout


def test_a_part_that_shrank_gets_a_lower_budget(tmp_path):
    folder = repository(tmp_path, lines=50, allowed=100)
    assert run(folder, "--write").returncode == 0
    assert "[source]\nlines = 51\n" in (folder / "tools/budget.toml").read_text()


def test_a_file_of_no_part_is_named(tmp_path):
    folder = repository(tmp_path, lines=1, allowed=10)
    (folder / "stray.py").write_text("")
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    done = run(folder)
    assert done.returncode == 1
    assert "stray.py is in no part" in done.stderr
