"""What the documents show is what there is."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("csrc/*.md")]


def test_the_example_of_the_readme_is_the_quickstart() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert (ROOT / "examples/quickstart.py").read_text() in blocks


def test_the_quickstart_runs_and_goes_on_when_it_is_run_again(tmp_path: Path) -> None:
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, str(ROOT / "examples/quickstart.py")],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        assert "step=500" in result.stdout
        assert "rows_restored=25000, rows_stale=0" in result.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_file_a_document_names_exists(document: Path) -> None:
    for target in re.findall(r"`((?:python_tests|cpr_ext|csrc)/[\w/.]+)`", document.read_text()):
        assert (ROOT / target).exists(), target
