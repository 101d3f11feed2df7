"""The least that parity at every step can do: gather, XOR, send, apply; one after the other.

Keeps no log, asks for no acknowledgement and cannot recover. It is the limit next to which
``parity_overhead.py`` shows the library.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist


class SimpleParity:
    """Of one worker; all workers are one group.

    Args:
        tables: the optimizer of the tables, a ``RowWiseAdagrad``.
        seconds: where the time of each stage is added.
    """

    def __init__(self, model: Any, tables: Any, group: Any, seconds: Counter[str]) -> None:
        self._tables = tables
        self._group = group
        self._seconds = seconds
        self._weights = [p for of_group in tables.param_groups for p in of_group["params"]]
        self._first = torch.tensor([0, *[len(w) for w in self._weights]]).cumsum(0)
        parts = group.size() - 1
        self._part_rows = -(-int(self._first[-1]) // parts)
        words = self._weights[0].shape[1] // 2 + 1  # two floats a word, and the row's sum
        self._parity = torch.zeros(self._part_rows, words, dtype=torch.int64)

    def before(self) -> None:
        """Keep the rows that the optimizer is about to change."""
        begun = time.perf_counter()
        self._ids = [w.grad._indices()[0].unique() for w in self._weights]
        self._old = self._gather()
        self._add("gather", begun)

    def after(self) -> None:
        """Send what it changed, and apply what the others sent."""
        begun = time.perf_counter()
        delta = self._gather()
        begun = self._add("gather", begun)
        delta ^= self._old
        shifted = zip(self._ids, self._first, strict=False)
        ids = torch.cat([ids + first for ids, first in shifted])
        packed = torch.cat((ids.unsqueeze(1), delta), dim=1)
        bounds = torch.arange(1, self._group.size() - 1) * self._part_rows
        cuts = [0, *torch.searchsorted(ids, bounds).tolist(), len(ids)]
        begun = self._add("xor and pack", begun)
        received = self._exchange(packed, cuts)
        begun = self._add("send", begun)
        for rows in received:
            at = rows[:, 0] % self._part_rows
            self._parity[at] ^= rows[:, 1:]
        self._add("apply", begun)

    def _gather(self) -> torch.Tensor:
        """The rows of the gradients and their sums, as words."""
        found = []
        for weight, ids in zip(self._weights, self._ids, strict=True):
            rows = weight.detach()[ids].view(torch.int64)
            state = self._tables.state[weight]
            sums = state["sum"][ids].view(torch.int32) if "sum" in state else torch.zeros(len(ids))
            found.append(torch.cat((rows, sums.to(torch.int64).unsqueeze(1)), dim=1))
        return torch.cat(found)

    def _exchange(self, packed: torch.Tensor, cuts: list[int]) -> list[torch.Tensor]:
        """Part ``j`` of member ``m`` goes to member ``m + 1 + j``; nothing to oneself."""
        me, size = self._group.rank(), self._group.size()
        order = [(me + 1 + part) % size for part in range(size - 1)]
        part_of = {member: part for part, member in enumerate(order)}
        sizes = [
            cuts[part_of[member] + 1] - cuts[part_of[member]] if member != me else 0
            for member in range(size)
        ]
        pieces = [
            packed[cuts[part_of[member]] : cuts[part_of[member] + 1]]
            for member in range(size)
            if member != me
        ]
        theirs = torch.empty(size, dtype=torch.int64)
        dist.all_to_all_single(theirs, torch.tensor(sizes), group=self._group)
        received = torch.empty(int(theirs.sum()), packed.shape[1], dtype=torch.int64)
        dist.all_to_all_single(
            received, torch.cat(pieces), theirs.tolist(), sizes, group=self._group
        )
        return list(received.split(theirs.tolist()))

    def _add(self, stage: str, begun: float) -> float:
        now = time.perf_counter()
        self._seconds[stage] += now - begun
        return now
