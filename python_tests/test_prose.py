"""Pages, docstrings and messages keep to the style guide of CONTRIBUTING.md."""

import re
from pathlib import Path

import pytest

from python_tests import prose

ROOT = Path(__file__).resolve().parents[1]
PAGES = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("csrc/*.md")}
PENDING = {ROOT / "docs/architecture.md"}  # rewritten together with the packages
# Packages and modules whose docstrings and messages are still to be rewritten.
PENDING_MODULES = {"cli", "distributed", "maintenance", "table_watch.py", "tracking", "tracking.py"}
MODULES = sorted(
    path
    for path in (ROOT / "cpr_ext").rglob("*.py")
    if not PENDING_MODULES.intersection(path.relative_to(ROOT).parts)
)
DECISIONS = sorted((ROOT / "docs/decisions").glob("0*.md"))

every_page = pytest.mark.parametrize(
    "page", sorted(PAGES - PENDING), ids=lambda page: str(page.relative_to(ROOT))
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


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_and_messages_use_plain_words(module: Path) -> None:
    assert list(prose.unplain_words_of_code(module.read_text())) == []


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
