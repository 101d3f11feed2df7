"""Pages, docstrings and messages keep to the style guide of CONTRIBUTING.md."""

import re
from pathlib import Path

import pytest

from python_tests import prose

ROOT = Path(__file__).resolve().parents[1]
PAGES = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("csrc/*.md")}
MODULES = sorted((ROOT / "cpr_ext").rglob("*.py"))
DECISIONS = sorted((ROOT / "docs/decisions").glob("0*.md"))

every_page = pytest.mark.parametrize(
    "page", sorted(PAGES), ids=lambda page: str(page.relative_to(ROOT))
)


@every_page
def test_a_page_uses_plain_words(page: Path) -> None:
    assert list(prose.unplain_words(page.read_text())) == []


@every_page
def test_a_page_has_short_sentences(page: Path) -> None:
    assert list(prose.long_sentences(page.read_text())) == []


@every_page
def test_a_page_wraps(page: Path) -> None:
    assert list(prose.long_lines(page.read_text())) == []


every_module = pytest.mark.parametrize(
    "module", MODULES, ids=lambda module: str(module.relative_to(ROOT))
)


@every_module
def test_docstrings_and_messages_use_plain_words(module: Path) -> None:
    assert list(prose.unplain_words_of_code(module.read_text())) == []


@every_module
def test_docstrings_have_short_sentences(module: Path) -> None:
    assert list(prose.long_sentences_of_code(module.read_text())) == []


@every_module
def test_docstrings_of_functions_begin_with_a_verb(module: Path) -> None:
    assert list(prose.docstrings_without_verb(module.read_text())) == []


def test_each_decision_is_listed_by_its_title() -> None:
    listed = (ROOT / "docs/decisions/README.md").read_text()
    entries = dict(re.findall(r"^- \[\d+\]\((\S+)\)\s+(.*(?:\n  .*)*)", listed, re.MULTILINE))
    assert sorted(entries) == [path.name for path in DECISIONS]
    for path in DECISIONS:
        title = path.read_text().splitlines()[0].partition(": ")[2]
        assert " ".join(entries[path.name].split()).startswith(title)


def test_words_of_the_guide_are_the_words_of_the_test() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", guide, re.MULTILINE)
    words = [word for row in rows for word in re.findall(r"`([^`]+)`", row)]
    assert len(words) > 10
    for word in words:
        assert list(prose.unplain_words(f"They {word} it.")), word


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""It tells all."""', 1),
        ('def f():\n    """Return.\n\n    It goes\n    on.\n    """', 1),
        ('raise ValueError(f"{x} tells all")', 1),
        ('"""It calls ``tells`` only."""', 0),
        ('told = "told"', 0),
    ],
)
def test_dialect_is_found_in_docstrings_and_messages(source: str, expected: int) -> None:
    assert len(list(prose.unplain_words_of_code(source))) == expected


LONG = " ".join(["word"] * 26)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("It tells all.", 1),
        ("# It tells all", 1),
        ("- It\n  tells all.", 1),
        ("| a | it tells |", 1),
        ("`tells` and [it](tells.md)", 0),
        ("```\nIt tells all.\n```", 0),
        ("Retells and foretold.", 0),
    ],
)
def test_dialect_is_found_in_prose_only(page: str, expected: int) -> None:
    assert len(list(prose.unplain_words(page))) == expected


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (LONG, 1),
        (f"{LONG[:60]}\n{LONG[61:]}", 1),
        (f"- {LONG}", 1),
        (f"| {LONG} |", 1),
        (LONG[:60], 0),
        (f"{LONG[:60]}. {LONG[:60]}.", 0),
        (f"{LONG[:60]}\n\n{LONG[:60]}", 0),
        (f"```\n{LONG}\n```", 0),
        (LONG.replace("word word", "`word word`"), 0),
    ],
)
def test_long_sentences_are_found_in_prose_only(page: str, expected: int) -> None:
    assert len(list(prose.long_sentences(page))) == expected


@pytest.mark.parametrize(
    ("page", "expected"),
    [(LONG, 1), (f"| {LONG} |", 0), (f"```\n{LONG}\n```", 0), ("x" * 120, 0), (LONG[:99], 0)],
)
def test_wide_lines_are_found_in_prose_only(page: str, expected: int) -> None:
    assert len(list(prose.long_lines(page))) == expected


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (LONG, 1),
        (f"Do it.\n\nArgs:\n    x: {LONG}", 1),
        (f"Do it.\n\nArgs:\n    x: {LONG[:60]}\n        {LONG[:70]}", 1),
        (f"Do it.\n\nArgs:\n    x: {LONG[:60]};\n        {LONG[:60]}", 0),
        (f"Do it.\n\nArgs:\n    x: {LONG[:60]}\n    y: {LONG[:60]}", 0),
        (f"Do it.\n\n{LONG[:60]};\n{LONG[:70]}", 1),
        (f"Do it::\n\n    {LONG}\n\nDo more.", 0),
        (f"Do it::\n\n    {LONG}\n\n{LONG}", 1),
    ],
)
def test_long_sentences_of_docstrings_are_found(docstring: str, expected: int) -> None:
    indented = docstring.replace("\n", "\n    ")
    source = f'def f():\n    """{indented}\n    """'
    assert len(list(prose.long_sentences_of_code(source))) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def f():\n    """The value."""', 1),
        ('def f():\n    """Whether it is so."""', 1),
        ('def f():\n    """``x`` as text."""', 1),
        ('async def f():\n    """Returns it."""', 1),
        ('class A:\n    def f():\n        """What it has."""', 1),
        ('def f():\n    """Return the value."""', 0),
        ('@property\ndef f():\n    """The value."""', 0),
        ('@click.command()\ndef f():\n    """A command."""', 0),
        ('class A:\n    """The value."""', 0),
    ],
)
def test_docstrings_without_a_verb_are_found(source: str, expected: int) -> None:
    assert len(list(prose.docstrings_without_verb(source))) == expected
