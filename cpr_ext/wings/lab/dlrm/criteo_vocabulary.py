"""Numbers the categories of one table in the order in which they are first seen."""

from __future__ import annotations

import numpy as np

from cpr_ext.wings.lab.dlrm.array_types import Int64

OVERFLOW_ROW = 0


class Vocabulary:
    """Categories of one table -> row ids 1, 2, ...; all that do not fit share row 0.

    Holds at most num_embeddings - 1 categories, 16 bytes each, in sorted arrays.

    Args:
        num_embeddings: rows of the table, with the overflow row.
    """

    def __init__(self, num_embeddings: int) -> None:
        self._capacity = num_embeddings - 1
        self._size = 0
        # Two levels, so that adding does not move the whole of a large vocabulary each time.
        self._settled = _Sorted.empty()
        self._recent = _Sorted.empty()

    def __len__(self) -> int:
        return self._size

    def add(self, categories: Int64) -> None:
        """Give the categories not yet known the next row ids, as long as there are any."""
        room = self._capacity - self._size
        if room == 0:
            return
        unique, first_seen = np.unique(categories, return_index=True)
        is_new = (self._settled.find(unique) == OVERFLOW_ROW) & (
            self._recent.find(unique) == OVERFLOW_ROW
        )
        new = unique[is_new][np.argsort(first_seen[is_new])][:room]
        row_ids = np.arange(self._size + 1, self._size + 1 + len(new))
        self._size += len(new)
        self._recent = self._recent.merged(new, row_ids)
        if len(self._recent.keys) > max(65_536, len(self._settled.keys) // 4):
            self._settle()

    def row_ids(self, categories: Int64) -> Int64:
        """Return row ids of the categories, the shape of `categories`; unknown ones get row 0."""
        self._settle()
        return self._settled.find(categories)

    def _settle(self) -> None:
        self._settled = self._settled.merged(self._recent.keys, self._recent.row_ids)
        self._recent = _Sorted.empty()


class _Sorted:
    def __init__(self, keys: Int64, row_ids: Int64) -> None:
        self.keys = keys
        self.row_ids = row_ids

    @staticmethod
    def empty() -> _Sorted:
        return _Sorted(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

    def find(self, keys: Int64) -> Int64:
        if len(self.keys) == 0:
            return np.full(keys.shape, OVERFLOW_ROW, dtype=np.int64)
        position = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[position] == keys, self.row_ids[position], OVERFLOW_ROW)

    def merged(self, keys: Int64, row_ids: Int64) -> _Sorted:
        if len(keys) == 0:
            return self
        all_keys = np.concatenate((self.keys, keys))
        order = np.argsort(all_keys, kind="stable")
        return _Sorted(all_keys[order], np.concatenate((self.row_ids, row_ids))[order])
