"""The checker of prose that ``make lint`` runs, and the list of decisions."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DECISIONS = sorted((ROOT / "docs/decisions").glob("0*.md"))
LONG = " ".join(["word"] * 26)


def _load_prose():
    spec = importlib.util.spec_from_file_location("prose", ROOT / "tools/prose.py")
    module = sys.modules["prose"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prose = _load_prose()


def test_every_finding_is_printed_with_its_file(tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "cpr_ext").mkdir()
    (tmp_path / "README.md").write_text(f"It tells all.\n\n{LONG}\n")
    (tmp_path / "docs/page.md").write_text("It is plain.\n")
    (tmp_path / "cpr_ext/module.py").write_text('def f():\n    """The value."""\n')
    assert prose.main(tmp_path) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed[:-1]] == ["README.md"] * 3 + [
        "cpr_ext/module.py"
    ]
    (tmp_path / "README.md").write_text("It is plain.\n")
    (tmp_path / "cpr_ext/module.py").write_text("")
    assert prose.main(tmp_path) == 0


def test_each_decision_is_listed_by_its_title():
    listed = (ROOT / "docs/decisions/README.md").read_text()
    entries = dict(re.findall(r"^- \[\d+\]\((\S+)\)\s+(.*(?:\n  .*)*)", listed, re.MULTILINE))
    assert sorted(entries) == [path.name for path in DECISIONS]
    for path in DECISIONS:
        title = path.read_text().splitlines()[0].partition(": ")[2]
        assert " ".join(entries[path.name].split()).startswith(title)


def test_words_of_the_guide_are_the_words_of_the_test():
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
def test_dialect_is_found_in_docstrings_and_messages(source, expected):
    assert len(list(prose.unplain_words_of_code(source))) == expected


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
def test_dialect_is_found_in_prose_only(page, expected):
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
def test_long_sentences_are_found_in_prose_only(page, expected):
    assert len(list(prose.long_sentences(page))) == expected


@pytest.mark.parametrize(
    ("page", "expected"),
    [(LONG, 1), (f"| {LONG} |", 0), (f"```\n{LONG}\n```", 0), ("x" * 120, 0), (LONG[:99], 0)],
)
def test_wide_lines_are_found_in_prose_only(page, expected):
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
def test_long_sentences_of_docstrings_are_found(docstring, expected):
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
def test_docstrings_without_a_verb_are_found(source, expected):
    assert len(list(prose.docstrings_without_verb(source))) == expected
