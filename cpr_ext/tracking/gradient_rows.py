"""The rows of gradients, counted in the trackers of their tables."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from cpr_ext._native import native
from cpr_ext.errors import UntrackedChangeWarning
from cpr_ext.runtime.cuda import device_of, devices_of, is_capturing, kept_for_stream
from cpr_ext.state.table import Table

_NOT_LISTED = (
    "a CUDA graph changes table '{name}' by dense gradients, of which a graph cannot list the "
    "rows: they do not count as changed, and are saved once a comparison with what was saved finds "
    "them. Use sparse gradients, so that each replay counts its rows"
)

#: Called with tables and, of each, the ids (n,) int64 of rows that are about to change, some
#: perhaps repeated.
RowsChange = Callable[[Sequence[Table], Sequence[torch.Tensor]], None]


def changed_rows(gradient: torch.Tensor, pool: native.ThreadPool | None = None) -> torch.Tensor:
    """Row ids (n,) int64, some perhaps repeated, outside of which a gradient is zero."""
    if gradient.layout == torch.sparse_coo:
        indices = gradient._indices()
        return indices.view(-1) if indices.shape[0] == 1 else indices[0].contiguous()
    if gradient.layout != torch.strided:
        return changed_rows(gradient.to_sparse_coo())  # type: ignore[no-untyped-call]
    if gradient.is_cuda or not gradient.is_contiguous():
        return gradient.any(dim=1).nonzero().view(-1)
    return torch.from_numpy(native.nonzero_rows(gradient, pool))


class GradientRows:
    """Counts the rows of gradients; tables are given by their positions.

    Args:
        trackers: of each table.
        pool: native threads that look for the rows of dense gradients.

    Attributes:
        num_updates: rows counted so far, with multiplicity.
        unlisted: positions of tables that a CUDA graph changes without counting rows.
        counter: of rows, in the trackers of their tables.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        trackers: Sequence[native.RowTracker],
        pool: native.ThreadPool | None,
    ) -> None:
        self.num_updates = 0
        self.unlisted: set[int] = set()
        self._tables = tables
        self._trackers = trackers
        self._pool = pool
        self._devices = devices_of(table.weight for table in tables)
        each = [(tracker,) for tracker in trackers]
        self.counter = native.RowCounter([table.weight for table in tables], each, pool)

    @property
    def error(self) -> str | None:
        """Why rows were not counted; None: all were."""
        return self.counter.error

    def count(self, owned: Sequence[int], rows_change: RowsChange | None) -> Sequence[int]:
        """Count the rows of the gradients; returns the positions of the tables that have one.

        Args:
            rows_change: called before. None costs less.
        """
        if rows_change is not None or (self._devices and is_capturing()):
            return self._count_each(owned, rows_change)
        if self._devices:
            kept: list[torch.Tensor] = []
            with kept_for_stream(kept, self._devices):
                num_rows, stepped, unread = self.counter.count_gradients(owned, kept)
        else:
            num_rows, stepped, unread = self.counter.count_gradients(owned)
        self.num_updates += num_rows
        if unread:
            self._count_each(unread, None)
        return stepped

    def _count_each(self, owned: Sequence[int], rows_change: RowsChange | None) -> list[int]:
        stepped: list[int] = []
        indexes: list[int] = []
        rows: list[torch.Tensor] = []
        is_captured = is_capturing()
        for index in owned:
            gradient = self._tables[index].weight.grad
            if gradient is None:
                continue
            stepped.append(index)
            if is_captured and device_of(gradient) is not None:
                self._capture_counting(index, gradient)
                continue
            indexes.append(index)
            rows.append(changed_rows(gradient, self._pool))
        if rows_change is not None:
            rows_change([self._tables[index] for index in indexes], rows)
        self.count_rows(indexes, rows)
        self.num_updates += sum(row_ids.numel() for row_ids in rows)
        return stepped

    def _capture_counting(self, index: int, gradient: torch.Tensor) -> None:
        """Have the CUDA graph that is being captured count the rows of a gradient, if it can."""
        # Listing the rows of a dense gradient waits for the device, which ends a capture.
        if gradient.layout == torch.sparse_coo:
            self.count_rows([index], [changed_rows(gradient)])
        else:
            self.unlisted.add(index)
            text = _NOT_LISTED.format(name=self._tables[index].name)
            warnings.warn(text, UntrackedChangeWarning, stacklevel=6)

    def count_rows(self, indexes: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Count rows (n,) of tables as changed, once each; not as updates."""
        with kept_for_stream(list(rows), self._devices):
            self.counter.count_rows(indexes, rows)
