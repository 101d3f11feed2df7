"""Are the faults that reviews have found still found? Plants each, and runs the tests named for it.

    python tools/planted.py [NAME ...]     only those whose name has one of these in it

python_tests/planted/faults.toml has a text of the source for each class of fault that a review
found, what is written in its place, and tests that must fail by it. Each is planted in a scratch
copy of the checkout. Exit status 1 if one is not found, or its text is not there any more.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tomllib
from mutate import ROOT, _tree, run

FAULTS = ROOT / "python_tests/planted/faults.toml"


def plant(fault: dict[str, str]) -> str:
    """The first test that fails by it; else what is wrong, in capitals."""
    path = Path(_tree(), fault["file"])
    source = path.read_text()
    if source.count(fault["text"]) != 1:
        return "ITS TEXT IS NOT THERE"
    path.write_text(source.replace(fault["text"], fault["planted"]))
    # What was compiled of another text of this length, in this second, would be taken for this.
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()
    code, results = run(_tree(), fault["tests"].split(), 600, enough=0)
    path.write_text(source)
    failed = [test for test, outcome, _ in results if outcome == "failed"]
    if failed or code not in (0, 4, 5):
        return failed[0] if failed else f"status {code}"
    return "NOT FOUND" if results else "NO TEST OF THAT NAME"


def main(names: list[str]) -> int:
    """0 if each is found."""
    missed = 0
    for name, fault in tomllib.loads(FAULTS.read_text()).items():
        if not names or any(each in name for each in names):
            found = plant(fault)
            print(f"{name:52} {found}", flush=True)
            missed += found.isupper()
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
