"""From the lookups of a model to the trackers: hooks that note, and one native call per batch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cpr_ext._native import native
from cpr_ext.devices import keep_for_stream
from cpr_ext.errors import UsageError
from cpr_ext.row_updates import native_trackers
from cpr_ext.tables import Table

# A long run of forward passes without a step must not keep all its indices alive.
_MAX_PENDING_LOOKUPS = 1 << 24


class LookupRecorder:
    """Notes which rows each training batch looks up and counts them at :meth:`flush`.

    Lookups in eval mode or without gradients change no row and are not noted.
    """

    def __init__(self, tables: Sequence[Table], trackers: Sequence[Any], pool: Any) -> None:
        self._tables = tables
        self._natives = [native_trackers(tracker) for tracker in trackers]
        #: Lookups counted so far.
        self.num_lookups = 0
        self._index = {table.name: index for index, table in enumerate(tables)}
        self._pool = pool
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._pending_lookups = 0
        self._handles: list[Any] = []
        self._is_noting = False
        #: Called before lookups are counted; no one else uses the trackers once it returns.
        self.before_flush: Callable[[], None] | None = None
        # Changed by every noting in a compiled graph, so that no two are taken for the same.
        self._ticket = torch.zeros((), dtype=torch.int64)
        self._id = _register(self)

    def attach(self) -> None:
        """Place a hook on every module that looks rows up, and listen to other sources."""
        if self._handles:
            return
        self._is_noting = True
        for index, table in enumerate(self._tables):
            for module in table.modules:
                hook = self._make_hook(index)
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                self._handles.append(handle)
        sources = {id(t.lookups): t.lookups for t in self._tables if t.lookups is not None}
        for source in sources.values():
            self._handles.extend(source.attach(self._note_of))

    def detach(self) -> None:
        """Take the hooks away: the model runs as if this object did not exist."""
        self._is_noting = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note no lookup of the model inside the block."""
        # The hooks stay: a graph compiled without them would not see that they are back.
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
    def misses_lookups(self) -> bool:
        """Whether nothing was noted since the last flush although there are modules to watch."""
        return self._is_noting and bool(self._handles) and not self._pending

    def flush(self) -> None:
        """Count what was noted since the last flush, in one native call.

        Raises:
            RowIndexError: an index outside its table; nothing of the batch was counted. Of a table
                on a GPU this is known one flush later, and only such indices were not counted.
        """
        if not self._pending:
            return
        if self.before_flush is not None:
            self.before_flush()
        pending, self._pending, self._pending_lookups = self._pending, [], 0
        for _, indices in pending:
            keep_for_stream(indices)
        native.count_lookups(
            [tracker for index, _ in pending for tracker in self._natives[index]],
            [indices for index, indices in pending for _ in self._natives[index]],
            self._pool,
        )
        self.num_lookups += sum(indices.numel() for _, indices in pending)

    def forget(self) -> None:
        """Drop what was noted and not yet counted."""
        self._pending, self._pending_lookups = [], 0

    def _note_of(self, table: Table, indices: torch.Tensor) -> None:
        if self._is_noting:
            self._note(self._index[table.name], indices)

    def _note(self, index: int, indices: torch.Tensor) -> None:
        if indices.is_nested or not indices.is_contiguous():
            indices = indices.values() if indices.is_nested else indices.contiguous()
        self._pending.append((index, indices))
        self._pending_lookups += indices.numel()
        if self._pending_lookups > _MAX_PENDING_LOOKUPS:
            self.flush()

    def _make_hook(self, index: int) -> Any:
        recorder_id = self._id

        def note_lookups(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not (module.training and torch.is_grad_enabled()):
                return
            indices = args[0] if args else kwargs["input"]
            if torch.compiler.is_compiling():
                torch.ops.cpr_ext.note_lookups(indices, self._ticket, recorder_id, index)
            elif self._is_noting:
                self._note(index, indices)

        return note_lookups


# Operators take no Python objects, so a compiled graph names its recorder by number.
_recorders: weakref.WeakValueDictionary[int, LookupRecorder] = weakref.WeakValueDictionary()
_next_id = 0
_registry_lock = threading.Lock()


def _register(recorder: LookupRecorder) -> int:
    global _next_id
    with _registry_lock:
        _next_id += 1
        _recorders[_next_id] = recorder
        return _next_id


# In a compiled graph the noting is an operator. That it changes `ticket` keeps it where it is: it
# is neither optimised away nor, for two lookups of the same indices, done once.
@torch.library.custom_op("cpr_ext::note_lookups", mutates_args=("ticket",))
def _note_lookups(
    indices: torch.Tensor, ticket: torch.Tensor, recorder_id: int, table_index: int
) -> None:
    ticket.add_(1)
    recorder = _recorders.get(recorder_id)
    if recorder is not None and recorder._is_noting:
        # A copy: the graph may use the memory of its intermediate values again.
        recorder._note(table_index, indices.clone())


@_note_lookups.register_fake
def _(indices: torch.Tensor, ticket: torch.Tensor, recorder_id: int, table_index: int) -> None:
    return None
