"""What the tools print: JSON or lines, sizes for people, and a progress bar."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from typing_extensions import Self

json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON document to stdout instead of lines; all else goes to stderr.",
)
store_argument = click.argument("store", type=click.Path(file_okay=False))
_addresses: dict[str, str] = {}  # of the temporary directories that hold copies
world_size_option = click.option(
    "--world-size",
    type=click.IntRange(min=1),
    help="If the directory holds jobs of several sizes: the one of so many workers.",
)


def show_as(directory: str, address: str) -> None:
    """Print the address of a copy wherever the directory that holds it would be named."""
    _addresses[directory] = address


def _with_addresses(text: str) -> str:
    for directory, address in _addresses.items():
        text = text.replace(directory, address)
    return text


def print_json(result: DataclassInstance, **more: Any) -> None:
    """Print a result as one JSON document."""
    click.echo(_with_addresses(to_json({**asdict(result), **more})))


def to_json(document: Any) -> str:
    """Return valid JSON: null in place of numbers that JSON lacks (NaN, infinity)."""
    return json.dumps(without_nan(document), indent=1, allow_nan=False)


def without_nan(value: Any) -> Any:
    """Return plain values with None in place of numbers that JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    return [without_nan(item) for item in value] if isinstance(value, list | tuple) else value


def printable(text: str, *, keep: str = "") -> str:
    """Return text without control characters: names in a store may hold any.

    The temporary directory of a copy is named by the copy's address.

    Args:
        keep: characters that stay all the same.
    """
    return "".join(
        letter if letter.isprintable() or letter in keep else ascii(letter)[1:-1]
        for letter in _with_addresses(text)
    )


def echo(text: str) -> None:
    """Print a line in which names of a store occur."""
    click.echo(printable(text))


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Align columns: the first to the left, the others to the right."""
    for line in table_lines(head, rows):
        click.echo(line)


def table_lines(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table: the first column to the left, the others to the right."""
    texts = [list(head), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(head))]
    lines = []
    for row in texts:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def size(size_bytes: float) -> str:
    """Return bytes as a person reads them: ``41.9 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def count(number: int, noun: str) -> str:
    """Return ``1 shard`` or ``3 shards``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Bar:
    """A progress bar on stderr, from the first time something is shown.

    Args:
        unit: what is counted.
        is_shown: None: if stderr is a terminal; then nothing of it stays there.
    """

    def __init__(self, unit: str, *, is_shown: bool | None) -> None:
        self._unit = unit
        self._is_shown = is_shown
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, done: int, total: int | None, message: str = "", more: str = "") -> None:
        """Show how much is done, perhaps less than before; a message goes above the bar."""
        if self._is_shown is False:
            return
        if self._bar is None:
            self._bar = tqdm(
                initial=done,
                unit=self._unit,
                unit_scale=True,
                dynamic_ncols=True,
                mininterval=0.2,
                disable=None if self._is_shown is None else False,
                leave=self._is_shown,
            )
        if message:
            self._bar.write(message, file=sys.stderr)
        self._bar.total = total
        self._bar.n = min(self._bar.n, done)
        self._bar.set_postfix_str(more, refresh=False)
        self._bar.update(done - self._bar.n)
