"""What changes tables: the steps of optimizers, seen by hooks, and all else, seen by versions.

An optimizer changes the rows of its gradient, so those are what counts, and they count just before
they change. Whether a lookup was made, by which module and in which mode, does not matter. Every
other change in place moves PyTorch's version counter of a tensor; the table then counts as changed
as a whole.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cpr_ext._native import native
from cpr_ext.cuda import device_of, devices_of, is_capturing, keep_for_stream, use_training_streams
from cpr_ext.errors import UntrackedChangeWarning
from cpr_ext.state.table import Table
from cpr_ext.tracking.abandoned_hooks import abandoned_hooks
from cpr_ext.tracking.change_listener import ChangeListener
from cpr_ext.tracking.changed_rows import changed_rows
from cpr_ext.tracking.drifting_tables import DriftingTables
from cpr_ext.tracking.row_ranges import RowSpans, complement, overlap
from cpr_ext.tracking.step_hooks import hook_of, identity_of, place_hook, with_closure
from cpr_ext.tracking.table_versions import TableVersions
from cpr_ext.tracking.trackers import native_trackers
from cpr_ext.tracking.unseen_steps import UnseenSteps
from cpr_ext.tracking.watch_messages import CHANGED_OUTSIDE, NOT_COUNTED, STRANGER, UNSEEN

_SETTLED_ROWS = 1 << 20  # at a time, so that their ids take little memory


@dataclass
class _Step:
    """An optimizer's step() that is being made.

    Attributes:
        written: positions of the tables that it writes.
    """

    optimizer: torch.optim.Optimizer
    written: set[int]


class TableWatch:
    """Knows which rows of the tables changed, and whether an optimizer has stepped.

    Args:
        trackers: by table name; the rows of gradients are counted in them.
        pool: native threads that look for the rows of dense gradients.

    Attributes:
        has_stepped: an optimizer has stepped since :meth:`begin_step`: the model is past the step
            that the Checkpointer knows.
        num_row_updates: rows of gradients counted so far, with multiplicity.
        before_change: called on the training thread before rows change and before trackers are
            used; no other thread uses either once it returns.
        rows_change: called then with a table and the ids (n,) of the rows that are about to change,
            some perhaps repeated. None, which ``before_change`` may choose, costs less.
        changed_outside: called with a table that something else than its optimizer has changed.
        listener: hears of all changes, whether or not a snapshot is being taken.
        stranger_stepped: called with an optimizer that was not given before it steps; it may be
            inside of one that was.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizers: Sequence[torch.optim.Optimizer],
        trackers: Mapping[str, Any],
        pool: Any,
    ) -> None:
        self.has_stepped = False
        self.num_row_updates = 0
        self.before_change: Callable[[], None] | None = None
        self.rows_change: Callable[[Table, torch.Tensor], None] | None = None
        self.changed_outside: Callable[[Table], None] | None = None
        self.listener: ChangeListener | None = None
        self.stranger_stepped: Callable[[torch.optim.Optimizer], None] | None = None
        self._tables = tables
        self._pool = pool
        self._trackers = [native_trackers(trackers[table.name]) for table in tables]
        self._counter = native.GradientCounter(
            [table.weight for table in tables], self._trackers, pool
        )
        self._by_weight = {id(table.weight): index for index, table in enumerate(tables)}
        self._optimizers = optimizers
        self._hooks: dict[int, tuple[Any, Any]] = {}  # before and after, by optimizer
        self._versions = TableVersions(tables)
        self._foreign_step: str | None = None  # of an optimizer that nobody gave; see problem
        self._foreign_tables: set[int] = set()
        self._parameters: dict[int, tuple[Any, list[int]]] = {}  # see _owned
        self._running: list[_Step] = []
        self._changed: dict[int, list[tuple[int, int]]] = {}  # ranges of rows, by table
        # Those that were made dirty as a whole since all was saved: some may not have changed.
        self._overcounted: dict[int, list[tuple[int, int]]] = {}
        self._unseen = UnseenSteps(tables)
        self._drifted = DriftingTables(tables)
        self._expected: set[int] = set()  # tables of which the user reports changes
        self._told: set[int] = set()  # those of which the user ever did
        self._devices = devices_of(table.weight for table in tables)
        self._reported: set[tuple[str, int]] = set()
        self._held_seconds = 0.0
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Listen to the steps of all optimizers of this process."""
        if self._handles:
            return
        # Weak: hooks of torch.optim live as long as the process.
        before, after = (hook_of(self, call) for call in ("_before_step", "_after_step"))
        self._hooks = {
            identity_of(optimizer): (
                optimizer.register_step_pre_hook(before),
                optimizer.register_step_post_hook(after),
            )
            for optimizer in self._optimizers
        }
        self._handles = [
            register_optimizer_step_pre_hook(hook_of(self, "_before_any_step")),
            *(handle for pair in self._hooks.values() for handle in pair),
        ]
        abandoned_hooks.remove()
        weakref.finalize(self, abandoned_hooks.take, self._handles).atexit = False
        self.accept()

    def detach(self) -> None:
        """Listen no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()
        abandoned_hooks.remove()

    @property
    def problem(self) -> str | None:
        """What makes further snapshots untrue, for a UsageError; None: nothing."""
        if self._foreign_step is not None:
            return self._foreign_step
        error = self._counter.error
        return None if error is None else NOT_COUNTED.format(error=error)

    @property
    def is_inside_step(self) -> bool:
        """Whether an optimizer is in the middle of its step."""
        return bool(self._running)

    def end_step(self, reported: Collection[int], captured: Collection[int]) -> None:
        """End a training step: rows of tables that none of its steps was seen of may have changed.

        Args:
            reported: positions of the tables of which lookups were counted in it.
            captured: those of which lookups were captured in a CUDA graph.
        """
        self._unseen.note_seen(reported)
        for index in captured:
            self._unseen.note_captured(index, is_counted=True)
        self._note_outside(self._unseen.end_step(), UNSEEN)

    def begin_step(self) -> None:
        """Begin a step: all changes of the model so far belong to the last one."""
        self._running.clear()  # an optimizer's step may have ended by an exception
        self._expected.clear()
        self.has_stepped = False

    def accept(self) -> None:
        """Take the tables as they are: whatever changed them until now was meant to."""
        self._versions.read()

    def forget(self) -> None:
        """Accept the tables as saved: nothing has changed since."""
        self._changed.clear()
        self._overcounted.clear()
        self._drifted.clear()
        self.begin_step()
        self._versions.read()

    def is_proven(self, table: Table) -> bool:
        """Return whether rows that no tracker calls dirty equal their saved state."""
        index = self._by_weight[id(table.weight)]
        unproven = (self._changed, self._unseen.captured, self._told, self._drifted)
        return not any(index in tables for tables in unproven) and self.problem is None

    def has_kept_still(self, table: Table) -> bool:
        """Return whether only known optimizers have changed the table since :meth:`settle`."""
        index = self._by_weight[id(table.weight)]
        return index not in self._changed and index not in self._expected and self.problem is None

    def check(self) -> None:
        """Look for changes outside of optimizers' steps; their tables count as changed."""
        if not self._running and not self._versions.are_same():
            self._note_outside(self._versions.differences())

    def looks_unchanged(self) -> bool:
        """Return whether :meth:`check` would find nothing."""
        return bool(self._running) or self._versions.are_same()

    def check_all(self) -> None:
        """Do the same as :meth:`check`, and find replaced tensors, too."""
        if not self._running:
            self._note_outside(self._versions.differences())

    def expect(self, table: Table) -> None:
        """Expect changes of a table that no optimizer has, until the next step."""
        if table.optimizer is None:
            index = self._by_weight[id(table.weight)]
            self._expected.add(index)
            self._told.add(index)

    def check_loss(
        self,
        lost: Callable[[Table], RowSpans],
        are_unchanged: Callable[[Table, RowSpans], bool] = lambda table, ranges: False,
    ) -> None:
        """Do the same as :meth:`check`, but rows that are about to be restored may change freely.

        Args:
            lost: the ranges [begin, end) of a table that are restored, ascending.
            are_unchanged: whether rows that count as clean were found to be as saved.
        """
        for index in self._versions.differences():
            table = self._tables[index]
            kept = complement(lost(table), table.num_embeddings)
            if kept and not are_unchanged(table, kept):
                self._changed.setdefault(index, []).extend(kept)
            if self._versions.has_other_state(index):  # by the loop, perhaps long ago
                self._overcounted.setdefault(index, []).extend(lost(table))
        self._versions.read()

    def counts_are_exact(self, table: Table, begin: int, end: int) -> bool:
        """Return whether of the rows [begin, end) just those that have changed are dirty."""
        index = self._by_weight[id(table.weight)]
        return self.is_proven(table) and not overlap(
            self._overcounted.get(index, []), [(begin, end)]
        )

    def note_all_saved(self) -> None:
        """Note that all rows that were dirty at the last :meth:`settle` are saved."""
        self._overcounted.clear()

    def accept_changes(self) -> None:
        """Do the same as :meth:`check_all` for reported changes: rows count, without a warning."""
        if self.listener is not None:
            for index in self._versions.differences():
                self.listener.changed_outside(self._tables[index])
        self.check_loss(lambda table: [])

    def settle(self) -> None:
        """Make the rows of tables that changed outside dirty, in their trackers.

        So are those of tables whose optimizer used to move rows without a gradient: its settings
        changed, or the table was frozen.
        """
        for index in self._drifted.take_settled():
            self._changed[index] = [(0, self._tables[index].num_embeddings)]
        for index, ranges in self._changed.items():
            self._overcounted.setdefault(index, []).extend(ranges)
            device = self._tables[index].weight.device
            for begin, end in ranges:
                for first in range(begin, end, _SETTLED_ROWS):
                    rows = torch.arange(first, min(end, first + _SETTLED_ROWS), device=device)
                    self._count([index], [rows])
        self._changed.clear()

    def take_held_seconds(self) -> float:
        """Return how long the hooks blocked training since the last call."""
        held_seconds, self._held_seconds = self._held_seconds, 0.0
        return held_seconds

    def note_hidden_change(self, table: Table, what: str) -> None:
        """Something has changed rows of a table, and no version counter moved."""
        self._note_outside({self._by_weight[id(table.weight)]: what})

    def note_moved(self, table: Table) -> None:
        """Note that another optimizer has a table now: its rows have other state."""
        index = self._by_weight[id(table.weight)]
        self._versions.accept_tables([index])
        self._changed[index] = [(0, table.num_embeddings)]

    def _note_outside(self, differences: Mapping[int, str], message: str = CHANGED_OUTSIDE) -> None:
        if differences:
            self._versions.accept_tables(differences)
        for index, what in differences.items():
            table = self._tables[index]
            if index in self._expected:
                continue
            self._changed[index] = [(0, table.num_embeddings)]
            if self.changed_outside is not None:
                self.changed_outside(table)
            if self.listener is not None:
                self.listener.changed_outside(table)
            if (message, index) not in self._reported:
                self._reported.add((message, index))
                text = message.format(name=table.name, what=what)
                warnings.warn(text, UntrackedChangeWarning, stacklevel=4)

    def _owned(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Positions of the tables that an optimizer has."""
        known = self._parameters.get(id(optimizer))
        if known is None or not known[0].are_same(optimizer.param_groups):
            positions = [
                self._by_weight[id(parameter)]
                for group in optimizer.param_groups
                for parameter in group["params"]
                if id(parameter) in self._by_weight
            ]
            known = native.ParameterLists(optimizer.param_groups), positions
            self._parameters[id(optimizer)] = known
        return known[1]

    def _before_any_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """See to it that other hooks of an optimizer come between this watch's two, or before."""
        if identity_of(optimizer) not in self._hooks:
            if self.stranger_stepped is not None:
                self.stranger_stepped(optimizer)
            owned = self._owned(optimizer)
            if owned and not self._running:
                name = self._tables[owned[0]].name
                # Unless it is a wrapper, inside of which a given optimizer steps.
                self._foreign_step = STRANGER.format(kind=type(optimizer).__name__, name=name)
                self._foreign_tables = set(owned)
                self.has_stepped = True
                if self.before_change is not None:
                    self.before_change()
            return
        before, after = self._hooks[identity_of(optimizer)]
        place_hook(optimizer._optimizer_step_pre_hooks, before.id, last=True)
        place_hook(optimizer._optimizer_step_post_hooks, after.id, last=False)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self.has_stepped = True
        owned = self._owned(optimizer)
        if not owned:
            return None  # it changes no table
        started = time.perf_counter()
        if not is_capturing():
            self._unseen.note_seen(owned)
        if self._foreign_step is not None and self._foreign_tables <= set(owned):
            self._foreign_step = None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        step = self._enter(optimizer, owned)
        step.written.update(self._drifted.note_step(optimizer, owned))
        if callable(closure):
            # The gradient exists once the closure has run, which may be several times.
            self._held_seconds += time.perf_counter() - started
            return with_closure(self._noting(closure, owned, step), args, kwargs)
        step.written.update(self._note_gradients(owned))
        self._held_seconds += time.perf_counter() - started
        return None

    def _enter(self, optimizer: torch.optim.Optimizer, owned: Collection[int]) -> _Step:
        if self._devices:
            use_training_streams(self._devices)
        if self.before_change is not None:
            self.before_change()
        if any(step.optimizer is optimizer for step in self._running):
            self._running.clear()  # its last step ended by an exception
        if self._running:  # this step is part of another one, or that ended by an exception
            self._check_tables(owned)
        else:
            self.check()
        self._running.append(_Step(optimizer, set()))
        return self._running[-1]

    def _check_tables(self, indexes: Collection[int]) -> None:
        if not self._versions.are_same():
            found = self._versions.differences()
            self._note_outside({index: found[index] for index in found if index in indexes})

    def _noting(
        self, closure: Callable[[], Any], owned: list[int], step: _Step
    ) -> Callable[[], Any]:
        def run_and_note() -> Any:
            started = time.perf_counter()
            self._versions.accept_tables(step.written)  # by the step, since the closure last ran
            self._held_seconds += time.perf_counter() - started
            loss = closure()
            started = time.perf_counter()
            self._check_tables(range(len(self._tables)))
            step.written.update(self._note_gradients(owned))
            self._held_seconds += time.perf_counter() - started
            return loss

        return run_and_note

    def _note_gradients(self, owned: list[int]) -> list[int]:
        """Count the rows of the gradients; returns the positions of the tables that have one."""
        if self.rows_change is not None or self.listener is not None:
            return self._note_each_gradient(owned)
        stepped: list[int]
        num_rows, stepped, unread = self._counter.count(owned)
        self.num_row_updates += num_rows
        if unread:
            self._note_each_gradient(unread)
        return stepped

    def _note_each_gradient(self, owned: Sequence[int]) -> list[int]:
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
        if self.rows_change is not None:
            for index, row_ids in zip(indexes, rows, strict=True):
                self.rows_change(self._tables[index], row_ids)
        if self.listener is not None:
            for index, row_ids in zip(indexes, rows, strict=True):
                self.listener.before_change(self._tables[index], row_ids)
        self._count(indexes, rows)
        self.num_row_updates += sum(row_ids.numel() for row_ids in rows)
        return stepped

    def _capture_counting(self, index: int, gradient: torch.Tensor) -> None:
        """Have the CUDA graph that is being captured count the rows of a gradient, if it can."""
        # Listing the rows of a dense gradient waits for the device, which ends a capture.
        is_counted = gradient.layout == torch.sparse_coo
        self._unseen.note_captured(index, is_counted=is_counted)
        if is_counted:
            self._count([index], [changed_rows(gradient)])

    def _count(self, indexes: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        if self._devices:
            for row_ids in rows:
                keep_for_stream(row_ids)
        native.count_lookups(
            [tracker for index in indexes for tracker in self._trackers[index]],
            [
                row_ids
                for index, row_ids in zip(indexes, rows, strict=True)
                for _ in self._trackers[index]
            ],
            self._pool,
        )

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not any(step.optimizer is optimizer for step in self._running):
            return
        started = time.perf_counter()
        while (step := self._running.pop()).optimizer is not optimizer:
            pass  # a step inside of this one that ended by an exception
        self._versions.accept_step(step.written)
        self._held_seconds += time.perf_counter() - started
