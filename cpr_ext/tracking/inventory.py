"""Whether snapshots hold what the ``state_dict()`` of the model and of its optimizers has.

With anything unaccounted, no snapshot is complete. It is looked up again at each snapshot, as
parameter groups, modules and optimizers may change while a job runs. What no ``state_dict()`` has,
such as attributes and gradients, is not looked at: no snapshot claims it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn

from cpr_ext.errors import UntrackedChangeWarning, UsageError
from cpr_ext.state.grown_buffers import buffer_forms
from cpr_ext.state.stateful import Declared
from cpr_ext.state.table import Table, owners_by_parameter
from cpr_ext.tracking.table_events import TableEvents
from cpr_ext.tracking.table_watch import TableWatch

_NOT_SAVED = (
    "{what} is not saved, so no snapshot is complete: {remedy}. This is reported once for each"
)
_REPLACED = (
    "table '{name}': the module that looks rows up in it is not in the model any more; make a new "
    "Checkpointer after such a change"
)


class _Unaccounted(NamedTuple):
    """State that no snapshot holds, and how it could; for a warning."""

    what: str
    remedy: str


class Inventory:
    """Looks up what a snapshot must hold; on the training thread.

    Args:
        declared: what the user names.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        tables: Sequence[Table],
        declared: Declared,
        events: TableEvents,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._tables = tables
        self._objects = [*declared.objects.values()]
        self._modules = {id(module) for module in model.modules()}
        # Optimizers that were not given and have stepped.
        self._strangers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        events.stranger_stepped.append(self._strangers.add)
        self._reported: set[str] = set()
        self._names = frozenset(model.state_dict(keep_vars=True))
        self._may_come = frozenset(buffer_forms(model))  # buffers that begin empty

    def follow_structure(self, watch: TableWatch) -> None:
        """Look up which optimizer updates each table now.

        Raises:
            UsageError: a module of a table has left the model.
        """
        self._refuse_replaced_modules()
        for table in self._moved_tables():
            watch.changes.note_moved(table)

    def _moved_tables(self) -> list[Table]:
        """Give each table the optimizer that has its weight now; return those of another one."""
        owners = owners_by_parameter(self._optimizers)
        moved = []
        for table in self._tables:
            is_given = any(table.optimizer is optimizer for optimizer in self._optimizers)
            if table.lookups is not None or not (is_given or table.optimizer is None):
                continue
            owner = owners.get(id(table.weight))
            # A table without owner was frozen: its state is still that of its last optimizer.
            if owner is not None:
                if owner[0] is not table.optimizer:
                    moved.append(table)
                table.note_owner(owner)
        return moved

    def _refuse_replaced_modules(self) -> None:
        """Raise UsageError if a module of a table has left the model."""
        modules = {id(module) for module in self._model.modules()}
        for table in self._tables:
            for module in table.modules:
                if id(module) in self._modules and id(module) not in modules:
                    raise UsageError(_REPLACED.format(name=table.name))

    def look(self, values: Mapping[str, Any]) -> bool:
        """Return whether a snapshot holds all of it; warn of what it does not, once.

        Args:
            values: the model's ``state_dict(keep_vars=True)``.
        """
        is_accounted = True
        for what, remedy in self._unaccounted(values):
            is_accounted = False
            if what not in self._reported:
                self._reported.add(what)
                text = _NOT_SAVED.format(what=what, remedy=remedy)
                warnings.warn(text, UntrackedChangeWarning, stacklevel=4)
        return is_accounted

    def _unaccounted(self, values: Mapping[str, Any]) -> Iterator[_Unaccounted]:
        saved = {id(value) for value in values.values()}
        saved |= {id(table.weight) for table in self._tables}
        yield from self._of_other_names(values.keys())
        yield from self._of_strangers(saved)
        for optimizer in self._optimizers:
            if not any(optimizer is item for item in self._objects):
                yield from _of_optimizer(optimizer, saved)

    def _of_other_names(self, now: Set[str]) -> Iterator[_Unaccounted]:
        more = sorted(now - self._names - self._may_come)
        less = sorted(self._names - now - self._may_come)
        if more or less:
            has = f"has {_first(more)}, which it did not have" if more else ""
            lacks = f"lacks {_first(less)}, which it had" if less else ""
            yield _Unaccounted(
                "the structure of the model, whose state_dict() "
                + f"{', and '.join(filter(None, (has, lacks)))} when the Checkpointer was made,",
                "a program that builds the model under those names cannot recover. Build all of it "
                "first, for example by one batch, then make the Checkpointer",
            )

    def _of_strangers(self, saved: set[int]) -> Iterator[_Unaccounted]:
        own = {id(p) for o in self._optimizers for g in o.param_groups for p in g["params"]}
        fused = {id(table.weight) for table in self._tables if table.lookups is not None}
        for optimizer in list(self._strangers):
            if any(optimizer is item for item in self._objects):
                continue
            of_model = [
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
                if id(parameter) in saved | own and id(parameter) not in fused
            ]
            if any(self._has_other_state(optimizer, parameter) for parameter in of_model):
                kind = type(optimizer).__name__
                yield _Unaccounted(
                    f"the state of a {kind} that steps parameters of the model",
                    "give it to the Checkpointer, in place of what wraps it if something does: "
                    f"Checkpointer(model, [that {kind}], ...)",
                )

    def _has_other_state(self, optimizer: torch.optim.Optimizer, parameter: Any) -> bool:
        """Return whether it has state of a parameter that no given optimizer has."""
        state = dict(optimizer.state.get(parameter) or {})
        return bool(state) and not any(
            all(value is known.get(name) for name, value in state.items())
            for known in (dict(given.state.get(parameter) or {}) for given in self._optimizers)
        )


def _first(names: Sequence[str]) -> str:
    return f"'{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _of_optimizer(optimizer: torch.optim.Optimizer, saved: set[int]) -> Iterator[_Unaccounted]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    others = [p for p in parameters if id(p) not in saved and p.requires_grad]
    if others:
        kind = type(optimizer).__name__
        yield _Unaccounted(
            f"a parameter of shape {tuple(others[0].shape)} that a {kind} updates and the model's "
            "state_dict() does not have",
            "give one module that holds all that is trained, such as a ModuleList of two models",
        )
