"""The notebooks: their cells run, and what they show is one run's. Running them: make test-site."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location(
        "notebook_pages", ROOT / "tools/notebook_pages.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(notebook):
    texts = ["".join(o["text"]) for cell in notebook["cells"] for o in cell.get("outputs", [])]
    return "\n".join(texts)


def require_a_killed_and_resumed_job(text):
    assert "return code -9\n" in text
    begins = re.findall(r"^begins after step (\d+)$", text, re.MULTILINE)
    (newest,) = re.findall(r"^newest snapshot: step (\d+), ", text, re.MULTILINE)
    assert begins == ["0", newest]
    assert "step 300: loss" in text
    assert "sound: True" in text
    assert "Recover partially and save" in text


def test_the_first_job_shows_a_kill_a_resumption_and_a_plan():
    (path,) = NOTEBOOKS
    require_a_killed_and_resumed_job(printed(json.loads(path.read_text())))


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(tool, path, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        cell.pop("outputs", None)
    tool.run(notebook["cells"], path.name)
    require_a_killed_and_resumed_job(printed(notebook))
    assert [*tmp_path.iterdir()]  # it works there


def test_a_cell_that_fails_is_named(tool):
    cells = [{"cell_type": "code", "source": ["1 / 0"]}]
    with pytest.raises(ZeroDivisionError) as caught:
        tool.run(cells, "x.ipynb")
    assert str(caught.traceback[-1].path) == "x.ipynb, cell 1"


def test_a_page_of_a_notebook_has_its_texts_code_and_output(tool):
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text."]},
        {"cell_type": "code", "source": ["print(6 * 7)"]},
    ]
    tool.run(cells, "x.ipynb")
    page = tool.to_markdown({"cells": cells})
    assert page == "# Title\n\nText.\n\n```python\nprint(6 * 7)\n```\n\n```text\n42\n```\n"
