"""Copies in the host's memory of rows on GPUs, which parity protects in place of the rows.

A copy has the rows as of the newest completed step. At its end the rows that it changed are copied
to the host. What leads rows back changes the copies, from which the GPU's rows are then restored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cpr_ext.runtime.cuda import device_of


class DeviceCopies:
    """Of the tables whose rows are on a GPU; those of others are not copied.

    Args:
        arrays: weight and state of each table, (num_embeddings, ...) each.
    """

    def __init__(self, arrays: Sequence[Sequence[torch.Tensor]]) -> None:
        #: Of each table the copies, or the arrays themselves.
        self.arrays: list[list[torch.Tensor]] = []
        self._copied: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._noted: dict[int, list[torch.Tensor]] = {}
        for number, given in enumerate(arrays):
            own = [array.detach() for array in given]
            found = own
            if device_of(given[0]) is not None:
                found = [torch.empty_like(array, device="cpu").copy_(array) for array in own]
                self._copied[number] = list(zip(own, found, strict=True))
            self.arrays.append(found)

    def note(self, number: int, row_ids: torch.Tensor) -> None:
        """Note that rows (n,) of the table at a position are about to change."""
        if number in self._copied:
            self._noted.setdefault(number, []).append(row_ids)

    def take(self) -> None:
        """Copy the rows that were noted since the last call, for which the host waits."""
        for array, copy, row_ids in self._changed():
            copy[row_ids] = array[row_ids.to(array.device)].to(copy.device)

    def take_all(self) -> None:
        """Copy all rows, those too that something has changed unseen."""
        self._noted.clear()
        for array, copy in self._pairs():
            copy.copy_(array)

    def give_back(self) -> None:
        """Restore the rows that were noted from their copies."""
        for array, copy, row_ids in self._changed():
            array[row_ids.to(array.device)] = copy[row_ids].to(array.device)

    def give_back_all(self) -> None:
        """Restore all rows from their copies."""
        self._noted.clear()
        for array, copy in self._pairs():
            array.copy_(copy)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [pair for pairs in self._copied.values() for pair in pairs]

    def _changed(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        noted, self._noted = self._noted, {}
        found = []
        for number, row_ids in noted.items():
            rows = torch.cat(row_ids).unique()  # type: ignore[no-untyped-call]
            found += [(array, copy, rows) for array, copy in self._copied[number]]
        return found
