"""What was measured, read from bench/results/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
