"""What the header of a segment notes of chunks whose rows are rounded and whose ids are packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cpr_ext._native import native

# As wide as the text of a float32 can get.
WIDEST_ERROR = 1.1111111111111112e-308
_ID_LIMIT = 2**62  # of row ids, in csrc/core/packed_row_ids.h

# What is marked of a row that was read: its values are those captured, or they were rounded, or one
# of both, as its segment was merged from others.
EXACT_ROW, ROUNDED_ROW, UNSURE_ROW = 0, 1, 2


class IdRun(NamedTuple):
    """The row ids of a chunk, as ``csrc/core/packed_row_ids.h`` packs them.

    Attributes:
        num_ids: how many.
        first, last: the smallest and the largest.
    """

    num_ids: int
    first: int
    last: int

    @property
    def packed_bytes(self) -> int:
        """Return the bytes that they take; raises UsageError if there cannot be such ids."""
        return int(native.packed_row_id_bytes(self.num_ids, self.first, self.last))


class Rounding(NamedTuple):
    """What became of the rows of a chunk that were to be rounded.

    Attributes:
        num_exact: rows that broke the bound, which are kept as they are.
        largest_error: no value of the others differs by more from the one that was captured.
    """

    num_exact: int
    largest_error: float


class RoundedRows(NamedTuple):
    """How many rows hold rounded values, at most, and the largest error of one.

    A segment notes it in ``rounded`` of its metadata if rows were rounded before it was written.
    """

    num_rows: int = 0
    largest_error: float = 0.0

    @classmethod
    def together(cls, several: Sequence[RoundedRows]) -> RoundedRows:
        """Return what several segments or chunks have."""
        return cls(
            sum(each.num_rows for each in several),
            max((each.largest_error for each in several), default=0.0),
        )

    @classmethod
    def noted(cls, metadata: Mapping[str, Any]) -> RoundedRows | None:
        """Return what a segment's metadata says of it; None: nothing."""
        return cls(*metadata["rounded"]) if "rounded" in metadata else None

    def to_note(self) -> dict[str, Any]:
        """Return what a segment's metadata is to say of it."""
        return {"rounded": list(self)} if self.num_rows else {}


class RoundedTally:
    """Counts rows that were read, by their marks."""

    def __init__(self) -> None:
        self._num_rounded = self._num_unsure = 0

    def add(self, marks: torch.Tensor) -> None:
        """Count rows that are marked (n,) uint8."""
        self._num_rounded += int((marks == ROUNDED_ROW).sum())
        self._num_unsure += int((marks == UNSURE_ROW).sum())

    def total(self, largest_error: float, most_unsure: int) -> RoundedRows:
        """Return how many rows are rounded, of the unsure ones at most so many."""
        num_rows = self._num_rounded + min(self._num_unsure, most_unsure)
        return RoundedRows(num_rows, largest_error) if num_rows else RoundedRows()


def are_runs(runs: Sequence[IdRun]) -> bool:
    """Return whether there can be such row ids, each run's after those of the one before."""
    smallest = 0
    for num_ids, first, last in runs:
        if not (smallest <= first <= last < _ID_LIMIT and 1 <= num_ids <= last - first + 1):
            return False
        if num_ids == 1 and first != last:
            return False
        smallest = last + 1
    return True


def id_runs_of(row_ids: np.ndarray[Any, np.dtype[np.int64]], rows_per_chunk: int) -> list[IdRun]:
    """Return the runs of ascending row ids, cut into chunks."""
    runs = []
    for first in range(0, len(row_ids), rows_per_chunk):
        ids = row_ids[first : first + rows_per_chunk]
        runs.append(IdRun(len(ids), int(ids[0]), int(ids[-1])))
    return runs
