"""A table that several processes hold, each a part of it: which rows and columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MOST = 2**48


@dataclass(frozen=True)
class TablePart:
    """The rows and columns of a table that one process holds.

    Attributes:
        table: name of the whole table, the same in every process.
        rows, columns: the ranges [begin, end) of it.
        num_embeddings, embedding_dim: the whole table's.

    Raises:
        ValueError: a range that is empty or reaches out of the table.
    """

    table: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    num_embeddings: int
    embedding_dim: int

    def __post_init__(self) -> None:
        for (begin, end), size in (
            (self.rows, self.num_embeddings),
            (self.columns, self.embedding_dim),
        ):
            if not 0 <= begin < end <= size <= _MOST:
                raise ValueError(f"[{begin}, {end}) is no part of table '{self.table}' of {size}")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the part."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def is_whole(self) -> bool:
        """The part is all of the table."""
        return self.shape == (self.num_embeddings, self.embedding_dim)

    @property
    def name(self) -> str:
        """The name of the part in the snapshots of the process that holds it."""
        if self.is_whole:
            return self.table
        rows, columns = ("{}:{}".format(*span) for span in (self.rows, self.columns))
        return f"{self.table}[{rows}, {columns}]"

    def overlap(self, other: TablePart) -> TablePart | None:
        """Return what both hold; None if they hold nothing in common."""
        if self.table != other.table:
            return None
        (row, last_row), (column, last_column) = (
            (max(a[0], b[0]), min(a[1], b[1]))
            for a, b in ((self.rows, other.rows), (self.columns, other.columns))
        )
        if row >= last_row or column >= last_column:
            return None
        return TablePart(
            self.table, (row, last_row), (column, last_column), *self._whole_shape(other)
        )

    def _whole_shape(self, other: TablePart) -> tuple[int, int]:
        return (
            max(self.num_embeddings, other.num_embeddings),
            max(self.embedding_dim, other.embedding_dim),
        )

    def to_json(self) -> dict[str, Any]:
        """Return what a manifest keeps of it."""
        return {
            "table": self.table,
            "rows": list(self.rows),
            "columns": list(self.columns),
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
        }

    @staticmethod
    def from_json(value: Any) -> TablePart:
        """Invert :meth:`to_json`. Raises ValueError, KeyError or TypeError on anything else."""
        numbers = (
            *value["rows"],
            *value["columns"],
            value["num_embeddings"],
            value["embedding_dim"],
        )
        if len(numbers) != 6 or not all(type(number) is int for number in numbers):
            raise ValueError(f"{value!r:.200} is no part of a table")
        return TablePart(str(value["table"]), numbers[0:2], numbers[2:4], numbers[4], numbers[5])
