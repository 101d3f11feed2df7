"""Reads pages, docstrings and messages as prose, for the style guide of CONTRIBUTING.md.

    python tools/prose.py

Prints every finding with its file and line; `make lint` begins with it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Pattern -> what to write instead. The table of CONTRIBUTING.md shows the most frequent ones.
PLAIN_WORDS = {
    r"tells?|told|telling": "report, state, show",
    r"(?:go|goes|going|went) on": "resume, continue",
    r"lies?|lying": "be (in, at)",
    r"anew|once more": "again",
    r"(?:bring|brings|brought) back|(?:come|comes|came) back": "restore, recover, return",
    r"(?:lay|lays|laid) over": "overwrite",
    r"(?:give|gives|giving|gave|given) up": "abort, drop",
    r"(?:hold|holds|held) (?:training|up|the job)": "block",
    r"behind": "after, in the background",
    r"beside": "next to, with, compared with, while",
    r"whoever": "name the actor",
    r"(?:stand|stands|stood) at": "be at",
    r"as (?:it|they) (?:was|were)": "unchanged",
    r"so (?:many|much|often) that": "state the number",
    r"mend(?:s|ed|ing)?": "repair, fix",
    r"strangers?": "untrusted (store, client)",
    r"now and then": "periodically",
    r"what there is": "name it",
    r"for ever": "forever",
}
MAX_COLUMNS = 100
MAX_WORDS = 25

_FENCE = re.compile(r"^\s*```")
_ITEM = re.compile(r"^\s*(?:[-*]|\d{1,2}\.)\s+")
_ASIDE = ("|", "#", "<!--", "![")


@dataclass(frozen=True)
class Passage:
    """A paragraph, list item, heading or part of a table's cell up to a semicolon, as one line."""

    line: int
    text: str


def plain_text(markdown: str) -> str:
    """``markdown`` with code as the word CODE and links as their texts."""
    text = re.sub(r"<!--.*?-->", "", markdown)
    text = re.sub(r"``.+?``|`[^`]+`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return text.replace("**", "").replace("*", "")


def prose_lines(page: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a page outside code blocks."""
    in_code = False
    for number, line in enumerate(page.splitlines(), 1):
        if _FENCE.match(line):
            in_code = not in_code
            yield number, ""
        elif not in_code:
            yield number, line


def passages(page: str) -> Iterator[Passage]:
    """Everything that is read as prose, in order."""
    start, lines = 0, list[str]()
    for number, line in [*prose_lines(page), (0, "")]:
        text = line.strip()
        if lines and (not text or text.startswith(_ASIDE) or _ITEM.match(line)):
            yield Passage(start, plain_text(" ".join(lines)))
            lines = []
        if text.startswith("|"):
            cells = re.split(r"(?<!\\)\|", text.strip("|"))
            parts = (part for cell in cells for part in plain_text(cell).split(";"))
            yield from (Passage(number, part.strip()) for part in parts)
        elif text.startswith(("#", "![")):
            yield Passage(number, plain_text(text).lstrip("# "))
        elif text:
            start = start if lines else number
            lines.append(_ITEM.sub("", line).strip())


def sentences(text: str) -> list[str]:
    """``text`` cut after full stops, question marks and exclamation marks."""
    ends = r"(?<=[.?!])[)\"']*\s+"
    return [part for part in re.split(ends, text) if part]


def long_lines(page: str) -> Iterator[str]:
    """Lines of prose wider than a page; tables, images and lines of one long word may be."""
    for number, line in prose_lines(page):
        text = line.strip()
        if len(line) > MAX_COLUMNS and " " in text and not text.startswith(("|", "![")):
            yield f"line {number}: {len(line)} columns"


def long_sentences(page: str) -> Iterator[str]:
    for passage in passages(page):
        for sentence in sentences(passage.text):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) > MAX_WORDS:
                yield f"line {passage.line}: {len(words)} words: {sentence}"


def unplain_words(page: str) -> Iterator[str]:
    for passage in passages(page):
        yield from _unplain(passage)


def unplain_words_of_code(source: str) -> Iterator[str]:
    """Words in docstrings and messages: all strings of several words in Python code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from _unplain(Passage(node.lineno, plain_text(" ".join(node.value.split()))))


# A docstring that begins like this names or asks, where it should say what the function does.
_NO_VERB = {
    *("A", "All", "An", "As", "By", "Every", "From", "How", "Its", "Nothing", "Of", "One", "Only"),
    *("Raises", "Returns", "Rows", "The", "True", "What", "Where", "Whether", "Which", "Why"),
    *("With", "Yields"),
}


def long_sentences_of_code(source: str) -> Iterator[str]:
    """Sentences of docstrings; an entry of Args and the like also ends at a semicolon."""
    for line, text in _docstrings(source):
        yield from (
            f"{found} (docstring of line {line})"
            for passage in _docstring_passages(text)
            for found in long_sentences(passage)
        )


def docstrings_without_verb(source: str) -> Iterator[str]:
    """Docstrings of functions that do not begin with a verb; properties may name their value."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            text = ast.get_docstring(node)
            if text and not re.search("property|click", decorators) and _has_no_verb(text):
                yield f"line {node.lineno}: {text.splitlines()[0]}"


def _has_no_verb(text: str) -> bool:
    return text.split()[0].strip(",:") in _NO_VERB or not text[0].isalpha()


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def _docstring_passages(text: str) -> Iterator[str]:
    """Its paragraphs and entries, without literal blocks."""
    lines = list[str]()
    is_literal = False
    for line in [*text.splitlines(), ""]:
        depth = len(line) - len(line.lstrip())
        if is_literal and (depth > 0 or not line):
            continue
        is_literal = line.endswith("::")
        if lines and (not line or is_literal or depth == _ENTRY or lines[-1] in _SECTIONS):
            yield "\n".join(lines)
            lines = []
        if line and not is_literal:
            lines.append(line.strip() if depth == 0 else line.strip().replace(";", "."))


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_ENTRY = 4  # indentation of an entry; its further lines have more
_SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:")


def _unplain(passage: Passage) -> Iterator[str]:
    for pattern, instead in PLAIN_WORDS.items():
        for match in re.finditer(rf"\b(?:{pattern})\b", passage.text, re.IGNORECASE):
            near = passage.text[max(0, match.start() - 40) : match.end() + 40]
            yield f"line {passage.line}: '{match[0]}': write {instead}: ...{near}..."


def findings(root: Path) -> Iterator[str]:
    """Everything in the pages and modules below ``root`` that the guide does not want."""
    pages = {*root.glob("*.md"), *(root / "docs").rglob("*.md"), *root.glob("csrc/*.md")}
    of_pages = (unplain_words, long_sentences, long_lines)
    of_code = (unplain_words_of_code, long_sentences_of_code, docstrings_without_verb)
    for paths, checks in [(pages, of_pages), ((root / "cpr_ext").rglob("*.py"), of_code)]:
        for path in sorted(paths):
            text = path.read_text()
            for check in checks:
                for found in check(text):
                    yield f"{path.relative_to(root)}: {found}"


def main(root: Path = ROOT) -> int:
    """Print all findings; 1 if there are any."""
    found = list(findings(root))
    print(*found, f"{len(found)} findings", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
