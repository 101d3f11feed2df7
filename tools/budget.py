"""How many lines each part of the project has, and may have.

    python tools/budget.py [--write]

Growth needs a reason: `make lint` fails if a part has more lines than `tools/budget.toml` allows.
A change that needs more raises the number there, and its commit says what the lines are for. With
`--write`, budgets of parts that shrank are lowered to what they have, and 2 % more.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
BUDGET = ROOT / "tools/budget.toml"
SOURCES = (".py", ".cpp", ".h", ".cu", ".c")
SPARE = 1.02


def parts_of(budget: dict[str, dict[str, object]]) -> dict[str, str]:
    """Folder or file -> part; the longest prefix of a path decides."""
    parts: dict[str, str] = {}
    for name, part in budget.items():
        folders = part["folders"]
        assert isinstance(folders, list)
        for folder in folders:
            assert folder not in parts, f"{folder} is in two parts"
            parts[folder] = name
    return parts


def sources(root: Path, parts: dict[str, str]) -> list[str]:
    """Paths of the checkout; of a copy without git, those in the folders of the parts."""
    if (root / ".git").exists():
        command = ["git", "-c", f"safe.directory={root}", "ls-files"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        return listed.stdout.split("\n")
    found = {path for folder in parts for path in (root / folder).rglob("*") if path.is_file()}
    return sorted(str(path.relative_to(root)) for path in found)


def count(root: Path, parts: dict[str, str]) -> Counter[str]:
    """Lines of each part; a source file of none is an error."""
    lines: Counter[str] = Counter()
    for path in sources(root, parts):
        if not path.endswith(SOURCES) or not (root / path).exists():
            continue
        prefixes = [folder for folder in parts if path.startswith(folder)]
        if not prefixes:
            sys.exit(f"{path} is in no part of {BUDGET.name}")
        lines[parts[max(prefixes, key=len)]] += len((root / path).read_text().splitlines())
    return lines


def main() -> int:
    """Print the parts; 1 if one has more lines than it may have."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="lower budgets of parts that shrank")
    options = parser.parse_args()
    budget = tomllib.loads(BUDGET.read_text())
    lines = count(ROOT, parts_of(budget))
    if options.write:
        text = BUDGET.read_text()
        for name, part in budget.items():
            if (least := int(lines[name] * SPARE)) < part["lines"]:
                text = text.replace(
                    f"[{name}]\nlines = {part['lines']}", f"[{name}]\nlines = {least}"
                )
        BUDGET.write_text(text)
        budget = tomllib.loads(text)
    is_over = False
    for name, part in budget.items():
        over = lines[name] > part["lines"]
        is_over |= over
        print(f"{name:12}{lines[name]:8}{part['lines']:8}{'  over its budget' if over else ''}")
    print(f"{'all':12}{sum(lines.values()):8}")
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
