"""Captures the dense state: for snapshots, and for other workers of the same job."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cpr_ext._native import native
from cpr_ext.errors import DamageError, UsageError
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.saving.run_state import RunState
from cpr_ext.state.dense_schema import read_position
from cpr_ext.state.dense_state import (
    DensePart,
    capture_dense,
    content_digest,
    refuse_nan,
    restore_dense,
    restore_own_part,
    shared_optimizers,
)
from cpr_ext.state.grown_buffers import buffer_forms, copy_unsaved_buffers
from cpr_ext.state.position import Position
from cpr_ext.state.stateful import Declared
from cpr_ext.state.table import Table
from cpr_ext.tracking.inventory import Inventory
from cpr_ext.tracking.table_watch import TableWatch

# Counting the rows that are not saved reads every counter, while training waits.
_MOST_COUNTED_ROWS = 2_000_000


class DenseCapture:
    """Copies the dense state of a model, with the position of its training.

    Args:
        trackers: by table name.
        inventory: knows what no snapshot holds.
        refuses_nan: raise NanError rather than capture NaN for a snapshot.

    Attributes:
        keeps_unsaved_buffers: snapshots have buffers that ``state_dict()`` leaves out, too.
        declared: the state that the user names is part of it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        tables: Sequence[Table],
        trackers: Mapping[str, native.RowTracker],
        watch: TableWatch,
        account: RunState,
        declared: Declared,
        inventory: Inventory,
        *,
        refuses_nan: bool,
    ) -> None:
        self.declared = declared
        self.keeps_unsaved_buffers = False
        self._model = model
        self._optimizers = optimizers
        self._tables = tables
        self._trackers = trackers
        self._watch = watch
        self._account = account
        self._inventory = inventory
        self._refuses_nan = refuses_nan
        self._forms = buffer_forms(model)
        self._is_readable = False

    def capture(self, count_waiting: Callable[[], int] = lambda: 0) -> tuple[DensePart, bool]:
        """Return a copy for a snapshot, and whether it and the tables are all that there is.

        Args:
            count_waiting: returns how many dirty rows it saves as they are now, but later.

        Raises:
            NanError: a parameter holds NaN, which is refused.
            UsageError: no store can hold it. The first one is read as a recovery reads it.
        """
        position = self._position(count_waiting)
        values = self._model.state_dict(keep_vars=True)
        is_accounted = self._inventory.look(values)
        part = self._capture(self._optimizers, position, values)
        if not self._is_readable:
            _require_readable(part)
            self._is_readable = True
        if self._refuses_nan:
            refuse_nan(part)
        return self._with_unsaved(part) if self.keeps_unsaved_buffers else part, is_accounted

    def content(self) -> bytes:
        """Return the :func:`content_digest` of what :meth:`capture` would return."""
        part = self._capture(self._optimizers, {})
        return content_digest(self._with_unsaved(part) if self.keeps_unsaved_buffers else part)

    def capture_shared(self, recovered: RecoveryReport | None) -> DensePart:
        """Return a copy of the state that all workers have in common.

        Args:
            recovered: of a recovery whose values the user has not seen yet: those are passed on
                instead of the user's.
        """
        position = self._position()
        if recovered is not None and (recovered.step > 0 or recovered.state):
            position["values"] = dict(recovered.state)
        optimizers = shared_optimizers(self._optimizers, self._tables)
        return self._capture(optimizers, position)

    def restore_shared(self, part: DensePart, *, generators: bool, buffers: bool) -> Position:
        """Load the state that all workers have in common; return its position.

        Objects that each process has for itself keep their state.

        Raises:
            StoreError: it is of another model; nothing was changed.
        """
        position = read_position(part.tree())
        optimizers = shared_optimizers(self._optimizers, self._tables)
        restore_dense(
            part,
            self._model,
            optimizers,
            self._tables,
            generators=generators,
            buffers=buffers,
            declared=self.declared,
            keep=self.declared.own,
        )
        return position

    def capture_whole(self, values: Mapping[str, Any] | None = None) -> DensePart:
        """Return a copy that :meth:`restore_whole` of any worker can go back to.

        Args:
            values: in place of the user's; None: the user's.
        """
        values = self.values() if values is None else dict(values)
        position = {**self._place(), "values": values, "rows_unsaved": None}
        return self._with_unsaved(self._capture(self._optimizers, position))

    def restore_whole(self, part: DensePart, own: DensePart | None) -> None:
        """Go back to ``part``; ``own``: what only this worker has, if ``part`` is shared.

        Raises:
            StoreError: it is of another model; nothing was changed.
        """
        model, optimizers, tables = self._model, self._optimizers, self._tables
        declared, all_of_them = self.declared, own is None
        given = optimizers if all_of_them else shared_optimizers(optimizers, tables)
        restore_dense(part, model, given, tables, generators=all_of_them, declared=declared)
        if own is not None:
            restore_own_part(own, model, optimizers, tables, declared)

    def _capture(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        position: dict[str, Any],
        values: Mapping[str, Any] | None = None,
    ) -> DensePart:
        return capture_dense(
            *(self._model, optimizers, self._tables, position, self.declared, self._forms), values
        )

    def values(self) -> dict[str, Any]:
        """Return the user's values as they are now, by name."""
        return {name: value() for name, value in self.declared.values.items()}

    def _with_unsaved(self, part: DensePart) -> DensePart:
        tree, tensors = copy_unsaved_buffers(self._model, self._tables)
        skeleton = {**part.skeleton, **tree}
        return replace(part, skeleton=skeleton, tensors={**part.tensors, **tensors})

    def _place(self) -> dict[str, Any]:
        return {
            "step": self._account.step,
            "num_samples": self._account.num_samples,
            "samples_lost": self._account.metrics.samples_lost,
        }

    def _position(self, count_waiting: Callable[[], int] = lambda: 0) -> dict[str, Any]:
        return {
            **self._place(),
            "values": self.values(),
            "rows_unsaved": self._count_unsaved_rows(count_waiting),
        }

    def _count_unsaved_rows(self, count_waiting: Callable[[], int]) -> int | None:
        num_rows = sum(table.num_embeddings for table in self._tables)
        if num_rows > _MOST_COUNTED_ROWS or not self._watch.changes.are_counted():
            return None
        dirty = sum(native.num_dirty_of(list(self._trackers.values())))
        return dirty - count_waiting()


def _require_readable(part: DensePart) -> None:
    """Raise UsageError for a part that a reader would call damaged."""
    try:
        written = json.loads(json.dumps(part.skeleton))
        read_position(replace(part, skeleton=written).tree())
    except (DamageError, ValueError) as error:
        raise UsageError(f"this state could be saved, but not recovered: {error}") from error
