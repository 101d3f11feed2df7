"""Lookups that a fused kernel's source or the user reports.

Of all other tables the gradients say which rows change, see :mod:`cpr_ext.tracking.table_watch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from cpr_ext.runtime.cuda import (
    device_of,
    devices_of,
    is_capturing,
    kept_for_stream,
    use_training_streams,
)
from cpr_ext.state.table import ChangeSource, Table
from cpr_ext.tracking.table_events import TableEvents

# A long run of forward passes without a step must not keep all its indices alive.
_MAX_PENDING_LOOKUPS = 1 << 24


class LookupRecorder:
    """Notes reported lookups and counts them at :meth:`flush`, in one native call per batch.

    Args:
        counter: of the tables' rows.
        events: receive what a source reports, before these rows change.
    """

    def __init__(
        self, tables: Sequence[Table], counter: native.RowCounter, events: TableEvents
    ) -> None:
        self._tables = tables
        self._counter = counter
        #: Lookups counted so far.
        self.num_lookups = 0
        self._devices = devices_of(table.weight for table in tables)
        self._index = {table.name: index for index, table in enumerate(tables)}
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._pending_lookups = 0
        self._from_source = False
        self._handles: list[Any] = []
        self._is_noting = False
        self._events = events

    def attach(self) -> None:
        """Listen to the sources of the tables."""
        if self._handles:
            return
        self._is_noting = True
        sources = {id(t.lookups): t.lookups for t in self._tables if t.lookups is not None}
        for source in sources.values():
            # Where a source knows: a pipeline may look rows up long before they change.
            listen = source.watch_changes if isinstance(source, ChangeSource) else source.attach
            self._handles.extend(listen(self._note_of))

    def detach(self) -> None:
        """Stop listening: the model runs as if this object did not exist."""
        self._is_noting = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing that a source reports inside the block."""
        was_noting, self._is_noting = self._is_noting, False
        try:
            yield
        finally:
            self._is_noting = was_noting

    def record(self, name: str, indices: torch.Tensor) -> None:
        """Note lookups of ``indices`` (any shape, int32 or int64) in table ``name``."""
        if name not in self._index:
            raise UsageError(f"no table {name!r}; there are: {', '.join(self._index)}")
        if not isinstance(indices, torch.Tensor):
            raise UsageError(
                f"table {name!r}: indices are a {type(indices).__name__}; needed: torch.Tensor"
            )
        self._note(self._index[name], indices)

    @property
    def is_mid_step(self) -> bool:
        """Whether a source has reported lookups since :meth:`begin_step`: rows may change now."""
        return self._from_source

    def begin_step(self) -> None:
        """Count rows that were looked up until now as changed."""
        self._from_source = False

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
        self._from_source = False

    def _note_of(self, table: Table, indices: torch.Tensor) -> None:
        if self._is_noting:
            index = self._index[table.name]
            self._from_source = True
            self._events.rows_change([table], [indices])
            self._note(index, indices)

    def _note(self, index: int, indices: torch.Tensor) -> None:
        if indices.is_nested or not indices.is_contiguous():
            indices = indices.values() if indices.is_nested else indices.contiguous()
        # Each replay of a graph counts what is in its memory then.
        if device_of(indices) is not None and is_capturing():
            self._count([(index, indices)])
            return
        self._pending.append((index, indices))
        self._pending_lookups += indices.numel()
        if self._pending_lookups > _MAX_PENDING_LOOKUPS:
            self.flush()

    def _count(self, lookups: Sequence[tuple[int, torch.Tensor]]) -> None:
        if not lookups:
            return
        self._events.before_use()
        # Those that are current now: a step() may have been on another stream, or not yet.
        use_training_streams(self._devices)
        with kept_for_stream([indices for _, indices in lookups], self._devices):
            self._counter.count_rows(
                [index for index, _ in lookups], [indices for _, indices in lookups]
            )
