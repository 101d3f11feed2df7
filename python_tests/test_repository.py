"""Pages and files agree: what pages link to, name, import and show is there."""

import ast
import importlib
import re
from contextlib import suppress
from pathlib import Path

from cpr_ext.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("csrc/*.md")]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHOWN = {"README.md": "quickstart.py", "docs/how_often.md": "target_pls.py"}


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


def faults_of(document):
    text = document.read_text()
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)", text):
        page = document.parent / target if target else document
        if not target.startswith("http") and not page.exists():
            yield f"{document}: no {target}"
        elif not target.startswith("http") and anchor and anchor not in anchors(page):
            yield f"{document}: no heading {target}#{anchor}"
    for target in re.findall(r"`((?:python_tests|cpr_ext|csrc)/[\w/.]+)`", text):
        if not (ROOT / target).exists():
            yield f"{document}: no {target}"
    for node in (node for block in BLOCK.findall(text) for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("cpr_ext"):
            with suppress(UsageError):  # it says what is not installed
                module = importlib.import_module(node.module)
                for each in node.names:
                    if not hasattr(module, each.name):
                        yield f"{document}: no {node.module}.{each.name}"


def test_what_pages_link_to_name_import_and_show_is_there(tmp_path):
    assert [fault for document in DOCUMENTS for fault in faults_of(document)] == []
    for page, example in SHOWN.items():
        assert (ROOT / "examples" / example).read_text() in BLOCK.findall((ROOT / page).read_text())
    page = tmp_path / "page.md"
    page.write_text(
        "# A b\n[a](#a-b) [b](#b) [c](c.md) `csrc/c.h`\n```python\nfrom cpr_ext import X\n```\n"
    )
    assert len(list(faults_of(page))) == 4
