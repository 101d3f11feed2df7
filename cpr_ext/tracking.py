"""From the lookups of a model to the trackers: hooks that note, and one native call per batch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from cpr_ext.tables import Table

# A long run of forward passes without a step must not keep all its indices alive.
_MAX_PENDING_LOOKUPS = 1 << 24


class LookupRecorder:
    """Notes which rows each training batch looks up and counts them at :meth:`flush`.

    Lookups in eval mode or without gradients change no row and are not noted. While
    :attr:`enabled` is False there are no hooks on the model at all.
    """

    def __init__(self, tables: Sequence[Table], trackers: Sequence[Any], pool: Any) -> None:
        self._tables = tables
        self._trackers = trackers
        self._index = {table.name: index for index, table in enumerate(tables)}
        self._pool = pool
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._pending_lookups = 0
        self._handles: list[Any] = []
        self._id = _register(self)

    @property
    def enabled(self) -> bool:
        """Whether the hooks are on the model."""
        return bool(self._handles)

    def attach(self) -> None:
        """Place a hook on every module that looks rows up."""
        if self._handles:
            return
        for index, table in enumerate(self._tables):
            for module in table.modules:
                hook = self._make_hook(index)
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                self._handles.append(handle)

    def detach(self) -> None:
        """Take the hooks away: the model runs as if this object did not exist."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside the block."""
        was_enabled = self.enabled
        self.detach()
        try:
            yield
        finally:
            if was_enabled:
                self.attach()

    def record(self, name: str, indices: torch.Tensor) -> None:
        """Note lookups of ``indices`` (any shape, int32 or int64) in table ``name``."""
        if name not in self._index:
            raise UsageError(f"no table {name!r}; there are: {', '.join(self._index)}")
        self._note(self._index[name], indices)

    def flush(self) -> None:
        """Count what was noted since the last flush, in one native call.

        Raises:
            RowIndexError: an index outside its table; nothing of the batch was counted.
        """
        if not self._pending:
            return
        pending, self._pending, self._pending_lookups = self._pending, [], 0
        native.count_lookups(
            [self._trackers[index] for index, _ in pending],
            [indices for _, indices in pending],
            self._pool,
        )

    def forget(self) -> None:
        """Drop what was noted and not yet counted."""
        self._pending, self._pending_lookups = [], 0

    def _note(self, index: int, indices: torch.Tensor) -> None:
        if indices.is_nested or not indices.is_contiguous():
            indices = indices.values() if indices.is_nested else indices.contiguous()
        self._pending.append((index, indices))
        self._pending_lookups += indices.numel()
        if self._pending_lookups > _MAX_PENDING_LOOKUPS:
            self.flush()

    def _make_hook(self, index: int) -> Any:
        recorder_id = self._id

        def note_lookups(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if not (module.training and torch.is_grad_enabled()):
                return None
            indices = args[0] if args else kwargs["input"]
            if not torch.compiler.is_compiling():
                self._note(index, indices)
                return None
            # In a compiled graph the noting is an operator whose output the lookup uses, so that
            # it is neither optimised away nor breaks the graph.
            noted = torch.ops.cpr_ext.note_lookups(indices, recorder_id, index)
            if args:
                return (noted, *args[1:]), kwargs
            return args, {**kwargs, "input": noted}

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


@torch.library.custom_op("cpr_ext::note_lookups", mutates_args=())
def _note_lookups(indices: torch.Tensor, recorder_id: int, table_index: int) -> torch.Tensor:
    noted = indices.clone()
    if (recorder := _recorders.get(recorder_id)) is not None:
        recorder._note(table_index, noted)
    return noted


@_note_lookups.register_fake
def _(indices: torch.Tensor, recorder_id: int, table_index: int) -> torch.Tensor:
    return torch.empty_like(indices)
