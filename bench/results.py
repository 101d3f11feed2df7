"""What was measured: kept in bench/results/, and read from there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpr_ext.wings.lab.emulation.machine import describe_machine

FOLDER = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]


class Results:
    """The result files of a folder; a benchmark that was not run has no rows."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder

    def file(self, name: str) -> dict[str, Any] | None:
        """A whole file; None if there is none."""
        path = self._folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def rows(self, file: str, /, **facts: Any) -> list[Row]:
        """The rows of a file that have these values."""
        found = (self.file(file) or {"rows": []})["rows"]
        return [row for row in found if facts.items() <= row.items()]

    def operations(self, stage: str, role: str, /, **facts: Any) -> list[Row]:
        """The rows of one role in the comparisons whose names begin with ``stage``."""
        rows = self.rows("operations", role=role, **facts)
        return [row for row in rows if row["group"].startswith(f"{stage} ")]


def standing(row: Row) -> str:
    """What a row of the operations is, or how fast it is beside its peers."""
    ratio = row.get("ratio_to_fastest_peer")
    return row["role"] if ratio is None else f"{ratio:.2f}x the fastest peer"


def show(rows: Sequence[Row]) -> None:
    """Print one line for each row, with the names of its values."""
    for row in rows:
        print(
            ", ".join(
                f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in row.items()
            )
        )


def keep(name: str, rows: Sequence[Row], **more: Any) -> None:
    """Write a result file, with the machine and the commit, and tell."""
    write(name, rows, machine=describe_machine(), **more)
    print(f"\nkept in {(FOLDER / name).relative_to(FOLDER.parents[1])}.json")


def write(name: str, rows: Sequence[Row], **more: Any) -> None:
    """Write a result file, whole; ``more`` has the ``machine``."""
    FOLDER.mkdir(exist_ok=True)
    result = {**more, "rows": list(rows)}
    (FOLDER / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def parser_of(documentation: str, *, has_children: bool = False) -> argparse.ArgumentParser:
    """The options that benchmarks share.

    Args:
        has_children: it runs itself once for each of several names, see ``in_own_process``.
    """
    parser = argparse.ArgumentParser(description=documentation.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes, nothing is kept")
    parser.add_argument("--folder", help="where to write files (default: the temporary folder)")
    if has_children:
        parser.add_argument("--only", default="", help="names that hold this; nothing is kept")
        parser.add_argument("--child", help=argparse.SUPPRESS)
        parser.add_argument("--child-folder", help=argparse.SUPPRESS)
    return parser
