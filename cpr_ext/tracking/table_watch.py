"""What changes tables: the steps of optimizers, seen by hooks, and all else, seen by versions.

An optimizer changes the rows of its gradient, so those are what counts, and they count just before
they change. Whether a lookup was made, by which module and in which mode, does not matter. Every
other change in place moves PyTorch's version counter of a tensor; the table then counts as changed
as a whole.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cpr_ext._native import native
from cpr_ext.runtime.cuda import (
    devices_of,
    use_training_streams,
)
from cpr_ext.state.table import AssignmentSource, Table
from cpr_ext.tracking.gradient_rows import GradientRows
from cpr_ext.tracking.outside_changes import OutsideChanges
from cpr_ext.tracking.table_events import TableEvents

# What torch's compiler compiles frames with now; None: it does not.
_compiler: Callable[[], Any] | None = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", None
)


_STRANGER = (
    "a {kind} that the Checkpointer does not know updates table '{name}'; its state would not be "
    "saved. Give all optimizers to the Checkpointer; after replacing one, make a new Checkpointer"
)


def hook_of(watch: Any, name: str) -> Callable[..., Any]:
    """Make a hook that calls this method of the watch for as long as the watch exists."""
    known, method = weakref.ref(watch), getattr(type(watch), name)

    def call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        watch = known()
        return None if watch is None else method(watch, optimizer, args, kwargs)

    uncompiled: Callable[..., Any] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    # Without a wrapper, which costs more than the hook. It does not reach what a function calls.
    skip = getattr(torch._dynamo, "skip", None) or getattr(torch._dynamo.decorators, "skip", None)
    if _compiler is None or skip is None:
        return uncompiled
    is_compiling = _compiler

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        chosen = call if is_compiling() is None else uncompiled
        return chosen(optimizer, args, kwargs)

    skipped: Callable[..., Any] = skip(hook)
    return skipped


def identity_of(optimizer: torch.optim.Optimizer) -> int:
    """Return the same for an optimizer and a wrapper that shares its attributes (Lightning's)."""
    return id(optimizer._optimizer_step_pre_hooks)


def place_hook(hooks: Any, key: int, *, last: bool) -> None:
    """Have the hook of that key called as the last, or the first, of an optimizer's."""
    if key in hooks and next(reversed(hooks) if last else iter(hooks)) != key:
        hooks.move_to_end(key, last=last)


def with_closure(closure: Callable[[], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of step() with another closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs  # the first is the optimizer


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
        events: receive all that is seen.

    Attributes:
        changes: outside of optimizers' steps.
        rows: counted so far.
        has_stepped: an optimizer has stepped since :meth:`begin_step`: the model is past the step
            that the Checkpointer knows.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizers: Sequence[torch.optim.Optimizer],
        trackers: Mapping[str, native.RowTracker],
        pool: native.ThreadPool | None,
        events: TableEvents,
    ) -> None:
        self.has_stepped = False
        self._events = events
        self._tables = tables
        self._by_weight = {id(table.weight): index for index, table in enumerate(tables)}
        self.rows = GradientRows(tables, [trackers[table.name] for table in tables], pool)
        self.changes = OutsideChanges(tables, self._by_weight, self.rows, events)
        self._held_seconds = 0.0
        self._optimizers = optimizers
        self._hooks: dict[int, tuple[int, int]] = {}  # numbers: before and after, by optimizer
        self._foreign_tables: set[int] = set()
        self._parameters: dict[int, tuple[Any, list[int]]] = {}  # see _owned
        self._running: list[_Step] = []
        self._devices = devices_of(table.weight for table in tables)
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Listen to the steps of all optimizers of this process."""
        if self._handles:
            return
        # Weak, and never removed once this is garbage, as that may be while they are called.
        before, after = (hook_of(self, call) for call in ("_before_step", "_after_step"))
        self._handles = [register_optimizer_step_pre_hook(hook_of(self, "_before_any_step"))]
        self._hooks = {}
        for optimizer in self._optimizers:
            pair = (
                optimizer.register_step_pre_hook(before),
                optimizer.register_step_post_hook(after),
            )
            self._hooks[identity_of(optimizer)] = pair[0].id, pair[1].id
            self._handles += pair
        sources: dict[int, Any] = {id(t.lookups): t.lookups for t in self._tables}
        for source in sources.values():
            if isinstance(source, AssignmentSource):
                self._handles += source.watch_assignments(self.writing_rows)
        self.changes.versions.read()

    def detach(self) -> None:
        """Listen no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()

    @property
    def is_inside_step(self) -> bool:
        """Whether an optimizer is in the middle of its step."""
        return bool(self._running)

    def begin_step(self) -> None:
        """Begin a step: all changes of the model so far belong to the last one."""
        self._running.clear()  # an optimizer's step may have ended by an exception
        self.has_stepped = False

    def take_held_seconds(self) -> float:
        """Return for how long hooks blocked training since the last call."""
        seconds, self._held_seconds = self._held_seconds, 0.0
        return seconds

    def _note_held(self, started: float) -> None:
        self._held_seconds += time.perf_counter() - started

    def check(self, *, replaced: bool = False) -> None:
        """Look for changes outside of optimizers' steps; their tables count as changed.

        Args:
            replaced: find replaced tensors, too.
        """
        if not (self._running if replaced else self.looks_unchanged()):
            self.changes.look()

    def looks_unchanged(self) -> bool:
        """Return whether :meth:`check` would find nothing."""
        return bool(self._running) or self.changes.versions.are_same()

    def count_rows(self, table: Table, row_ids: torch.Tensor) -> None:
        """Count rows (n,) of a table as changed, once each."""
        self.rows.count_rows([self._by_weight[id(table.weight)]], [row_ids])

    @contextmanager
    def writing_rows(self, table: Table, row_ids: torch.Tensor) -> Iterator[None]:
        """Expect that the block writes these rows (n,), and no others of the table."""
        use_training_streams(self._devices)
        self._events.before_use()
        index = self._by_weight[id(table.weight)]
        if not self._running:
            self.changes.note(self.changes.versions.differences([index]))
        self._events.rows_change([table], [row_ids])
        for listener in self._events.listeners:
            listener.before_write(table, row_ids)
        try:
            yield
        finally:
            self.count_rows(table, row_ids)  # else all rows count as changed
            self.changes.versions.accept_assigned(index)

    def rows_change(self, tables: Sequence[Table], row_ids: Sequence[torch.Tensor]) -> None:
        """Report to all who listen that rows (n,) of each table are about to change."""
        self._events.rows_change(tables, row_ids)
        for listener in self._events.listeners:
            for table, ids in zip(tables, row_ids, strict=True):
                listener.before_change(table, ids)

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

    def _before_any_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """See to it that other hooks of an optimizer come between this watch's two, or before."""
        own = self._hooks.get(identity_of(optimizer))
        if own is None:
            self._note_stranger(optimizer)
            return
        place_hook(optimizer._optimizer_step_pre_hooks, own[0], last=True)
        place_hook(optimizer._optimizer_step_post_hooks, own[1], last=False)

    def _note_stranger(self, optimizer: torch.optim.Optimizer) -> None:
        self._events.stranger_stepped(optimizer)
        owned = self._owned(optimizer)
        if not owned or self._running:
            return
        name = self._tables[owned[0]].name
        # Unless it is a wrapper, inside of which a given optimizer steps.
        self.changes.foreign_step = _STRANGER.format(kind=type(optimizer).__name__, name=name)
        self._foreign_tables = set(owned)
        self.has_stepped = True
        self._events.before_use()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self.has_stepped = True
        owned = self._owned(optimizer)
        if not owned:
            return None  # it changes no table
        started = time.perf_counter()
        changes = self.changes
        if changes.foreign_step is not None and self._foreign_tables <= set(owned):
            changes.foreign_step = None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        step = self._enter(optimizer, owned)
        changes.note_step(optimizer, owned)
        if callable(closure):
            # The gradient exists once the closure has run, which may be several times.
            self._note_held(started)
            return with_closure(self._noting(closure, owned, step), args, kwargs)
        step.written.update(self._count_gradients(owned))
        self._note_held(started)
        return None

    def _enter(self, optimizer: torch.optim.Optimizer, owned: Collection[int]) -> _Step:
        use_training_streams(self._devices)
        self._events.before_use()
        if self._running and any(step.optimizer is optimizer for step in self._running):
            self._running.clear()  # its last step ended by an exception
        if self._running:  # this step is part of another one, or that ended by an exception
            self.changes.look(owned)
        elif not self.changes.versions.are_same():
            self.changes.look()
        self._running.append(_Step(optimizer, set()))
        return self._running[-1]

    def _count_gradients(self, owned: list[int]) -> Sequence[int]:
        is_heard = self._events.rows_change or self._events.listeners
        return self.rows.count(owned, self.rows_change if is_heard else None)

    def _noting(
        self, closure: Callable[[], Any], owned: list[int], step: _Step
    ) -> Callable[[], Any]:
        def run_and_note() -> Any:
            started = time.perf_counter()
            self.changes.versions.accept_tables(
                step.written
            )  # by the step, since the closure last ran
            self._note_held(started)
            loss = closure()
            started = time.perf_counter()
            self.changes.look(range(len(self._tables)))
            step.written.update(self._count_gradients(owned))
            self._note_held(started)
            return loss

        return run_and_note

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        running = self._running
        if not running or not any(step.optimizer is optimizer for step in running):
            return
        started = time.perf_counter()
        while (step := running.pop()).optimizer is not optimizer:
            pass  # a step inside of this one that ended by an exception
        self.changes.versions.accept_tables(step.written)
        self._note_held(started)
