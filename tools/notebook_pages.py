"""Runs a notebook without Jupyter, and turns one into a page.

    python tools/notebook_pages.py docs/notebooks/first_job.ipynb

runs its cells in order and keeps what they print, in the file. Cells are plain Python: no magics,
and no value that a last line would show.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    path = parser.parse_args().notebook
    notebook = json.loads(path.read_text())
    run(notebook["cells"], str(path))
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def run(cells: list[Cell], name: str) -> None:
    """Run the code cells in one namespace; each keeps what it printed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code_cells = [cell for cell in cells if cell["cell_type"] == "code"]
    for number, cell in enumerate(code_cells, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), names)
        cell["execution_count"] = number
        text = printed.getvalue().splitlines(keepends=True)
        output = {"name": "stdout", "output_type": "stream", "text": text}
        cell["outputs"] = [output] if text else []


def to_markdown(notebook: dict[str, Any]) -> str:
    """Return the page: its texts, its code, and what the code printed."""
    return "\n".join(part for cell in notebook["cells"] for part in _parts(cell))


def _parts(cell: Cell) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield f"{source}\n"
        return
    yield f"```python\n{source}\n```\n"
    for output in cell["outputs"]:
        text = "".join(output["text"]).rstrip("\n")
        yield f"```text\n{text}\n```\n"


if __name__ == "__main__":
    main()
