"""The rows that fused kernels change in the backward pass.

Of all other tables the gradients say which rows change, see :mod:`cpr_ext.tracking.table_watch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.runtime.cuda import (
    device_of,
    devices_of,
    is_capturing,
    kept_for_stream,
    use_training_streams,
)
from cpr_ext.state.table import Table
from cpr_ext.tracking.gradient_rows import RowsChange
from cpr_ext.tracking.table_events import TableEvents

# A long run of backward passes without a step must not keep all its indices alive.
_MAX_PENDING_LOOKUPS = 1 << 24


class LookupRecorder:
    """Notes what fused kernels report, and counts it at :meth:`flush`, in one native call.

    Args:
        counter: of the tables' rows.
        rows_change: receives what a kernel reports, before these rows change.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        counter: native.RowCounter,
        events: TableEvents,
        rows_change: RowsChange,
    ) -> None:
        self._tables = tables
        self._counter = counter
        #: Lookups counted so far.
        self.num_lookups = 0
        #: Rows may have changed since :meth:`begin_step`.
        self.is_mid_step = False
        self._devices = devices_of(table.weight for table in tables)
        self._index = {table.name: index for index, table in enumerate(tables)}
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._pending_lookups = 0
        self._handles: list[Any] = []
        self._events = events
        self._rows_change = rows_change

    def attach(self) -> None:
        """Listen to the kernels of the tables."""
        if self._handles:
            return
        # A pipeline may look rows up long before they change.
        sources = {id(t.lookups): t.lookups for t in self._tables if t.lookups is not None}
        for source in sources.values():
            self._handles.extend(source.watch_changes(self._note))

    def detach(self) -> None:
        """Stop listening: the model runs as if this object did not exist."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_step(self) -> None:
        """Begin a step: what was reported until now belongs to the last one."""
        self.is_mid_step = False

    def flush(self) -> None:
        """Count what was noted since the last flush, in one native call.

        Raises:
            RowIndexError: an index outside its table; nothing of the batch was counted. Of a table
                on a GPU this is known one flush later, and only such indices were not counted.
        """
        if not self._pending:
            return
        pending, self._pending, self._pending_lookups = self._pending, [], 0
        self._count(pending)
        self.num_lookups += sum(indices.numel() for _, indices in pending)

    def forget(self) -> None:
        """Drop what was noted and not yet counted."""
        self._pending, self._pending_lookups = [], 0
        self.is_mid_step = False

    def _note(self, table: Table, indices: torch.Tensor) -> None:
        if not self.is_mid_step:
            self._events.before_use()
        self.is_mid_step = True
        self._rows_change([table], [indices])
        index, indices = self._index[table.name], indices.contiguous()
        # Each replay of a graph counts what is in its memory then.
        if device_of(indices) is not None and is_capturing():
            self._count([(index, indices)])
            return
        self._pending.append((index, indices))
        self._pending_lookups += indices.numel()
        if self._pending_lookups > _MAX_PENDING_LOOKUPS:
            self.flush()

    def _count(self, lookups: Sequence[tuple[int, torch.Tensor]]) -> None:
        self._events.before_use()
        # Those that are current now: a step() may have been on another stream, or not yet.
        use_training_streams(self._devices)
        with kept_for_stream([indices for _, indices in lookups], self._devices):
            self._counter.count_rows(
                [index for index, _ in lookups], [indices for _, indices in lookups]
            )
