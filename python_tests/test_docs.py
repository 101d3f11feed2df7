"""What the documents show is what there is."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from python_tests import preloaded

ROOT = Path(__file__).resolve().parents[1]
HOW_OFTEN = ROOT / "docs/how_often.md"
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("csrc/*.md")]


def test_the_example_of_the_readme_is_the_quickstart() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert (ROOT / "examples/quickstart.py").read_text() in blocks


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_file_a_document_names_exists(document: Path) -> None:
    for target in re.findall(r"`((?:python_tests|cpr_ext|csrc)/[\w/.]+)`", document.read_text()):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_anchor_of_a_link_is_a_heading(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", document.read_text()):
        if not target.startswith("http"):
            page = (document.parent / target) if target else document
            assert anchor in anchors(page), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


def test_the_example_of_the_guide_to_intervals_is_the_one_that_is_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", HOW_OFTEN.read_text(), re.DOTALL)
    assert blocks == [(ROOT / "examples/target_pls.py").read_text()]


@pytest.mark.timeout(300)
def test_every_command_of_the_guide_to_intervals_prints_what_it_shows(tmp_path: Path) -> None:
    """Exactly; after a line of three dots, and of a store's real bytes, but for the numbers."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    blocks = re.findall(r"```\n(\$ .*?\n)```", HOW_OFTEN.read_text(), re.DOTALL)
    commands = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.M)[1:]]
    assert len(commands) == 6
    for part in commands:
        command, _, shown = part.partition("\n")
        done = run_command(command, tmp_path)
        assert done.returncode == 0, done.stdout
        compared = without_numbers if "--store" in command else str
        exact, dots, end = shown.partition("...\n")
        if not dots:
            assert compared(done.stdout.rstrip()) == compared(exact.rstrip())
        printed = iter(compared(done.stdout).splitlines())  # other threads log in between
        assert [line for line in compared(exact).splitlines() if line not in printed] == []
        # On a busy machine the planner may tell of a new plan behind it.
        assert without_numbers(end) in without_numbers(done.stdout)


def run_command(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    name, *arguments = shlex.split(command)
    python = {"cpr": ["-m", "cpr_ext.cli"], "python": []}
    if name in python:
        return preloaded.run([*python[name], *arguments], cwd=folder, merged=True)
    return subprocess.run([name, *arguments], cwd=folder, capture_output=True, text=True)


def without_numbers(text: str) -> str:
    return re.sub(r"\d[\d.]*", "0", text)
