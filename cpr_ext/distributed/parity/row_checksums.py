"""Checksums of a worker's rows at its newest states, by which rows changed unseen are found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cpr_ext._native import native

# The rows of a shard are hashed in so many blocks: 32 KB to send per delta, whatever its size.
_BLOCKS = 4096
_MOST_THREADS = 4


class RowChecksums:
    """Follows the deltas of a shard: what they say is in the checksums, and nothing else.

    So rows that something else has changed differ from them (:meth:`find_wrong_rows`).

    Args:
        layout: of the shard.
        names: of the layout's tables, for messages.
    """

    def __init__(self, layout: Any, names: Sequence[str]) -> None:
        self._names = names
        threads = native.ThreadPool(num_threads=min(_MOST_THREADS, torch.get_num_threads()))
        self._native = native.ShardChecksums(layout, max_blocks=_BLOCKS, pool=threads)
        self._known: dict[int, torch.Tensor] = {}  # by state

    def begin(self, state: int) -> None:
        """Take the rows as they are: they are of ``state``."""
        self._native.read()
        self._known = {state: self._values()}

    def finish_delta(self, delta: Any, step: int, oldest: int) -> None:
        """Complete a delta, which leads to ``step``; states before ``oldest`` are forgotten."""
        delta.finish(self._native)
        self._known = {s: values for s, values in self._known.items() if s >= oldest}
        self._known[step] = self._values()

    def of_state(self, state: int) -> torch.Tensor:
        """Return the checksums of a state (n,) uint8."""
        return self._known[state].view(torch.uint8)

    def go_back(self, state: int) -> None:
        """Take the checksums of an earlier state, whose rows are back."""
        self._known = {s: values for s, values in self._known.items() if s <= state}
        self._native.restore(self._known[state])

    def restore(self, state: int, checksums: torch.Tensor) -> None:
        """Take what :meth:`of_state` returned on another worker for these rows."""
        self._known = {state: checksums.view(torch.int64)}
        self._native.restore(self._known[state])

    def find_wrong_rows(self, begin: int = 0, end: int | None = None) -> str:
        """Return which rows are not those of the checksums; empty: all are.

        Args:
            begin, end: look only at blocks of rows that end after the word ``begin`` of the shard,
                and not after ``end``; None: the last.
        """
        wrong = self._native.find_wrong_rows(begin, end)
        if not wrong:
            return ""
        table, begin, end = wrong[0]
        more = f", and {len(wrong) - 1} more blocks of rows" if len(wrong) > 1 else ""
        return f"{self._names[table]}, among rows {begin} to {end - 1}{more}"

    def _values(self) -> torch.Tensor:
        return torch.from_numpy(self._native.values())
