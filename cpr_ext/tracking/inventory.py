"""What training carries from step to step, and whether all of it is saved.

Everything is row state (of a table), dense (in the model's ``state_dict()``, or an optimizer's
state of it), declared, or *unaccounted*. What is declared has its bits in ``stateful=`` or
``extra_state=``. With anything unaccounted, no snapshot is complete. It is looked up again at each
snapshot, as parameter groups, modules and optimizers may change while a job runs.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from cpr_ext.errors import UntrackedChangeWarning, UsageError
from cpr_ext.state.stateful import Declared, capture_stateful
from cpr_ext.state.table import Table, optimizers_by_parameter
from cpr_ext.tracking.carried import (
    PendingGradients,
    attributes_of,
    is_same_mark,
    is_within,
    last_name,
    leaves,
    mark_of,
)
from cpr_ext.tracking.table_watch import TableWatch

_NOT_SAVED = (
    "{what} is not saved, so no snapshot is complete: {remedy}. If training does not need it back: "
    'ignore=["{name}"]. This is reported once for each'
)
_REPLACED = (
    "table '{name}': the module that looks rows up in it is not in the model any more; make a new "
    "Checkpointer after such a change"
)


class _Unaccounted(NamedTuple):
    """State that no snapshot holds.

    Attributes:
        name: by which ``ignore=`` names it.
        what, remedy: for a warning.
        values: it is accounted for where what is declared has these; empty: nowhere.
        key: the name of the values.
    """

    name: str
    what: str
    remedy: str
    values: Sequence[Any] = ()
    key: str = ""


class Inventory:
    """Looks up what a snapshot must hold; on the training thread.

    Args:
        declared: what the user names.
        gradients: those that no optimizer has applied yet.

    Attributes:
        unaccounted: what no snapshot holds, one phrase each.
        ignored: names of what no snapshot holds, and need not, in order.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        tables: Sequence[Table],
        declared: Declared,
        gradients: PendingGradients,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._tables = tables
        self._declared = declared
        self._stateful = declared.stateful
        self._gradients = gradients
        self._modules = {id(module) for module in model.modules()}
        self._strangers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._reported: set[str] = set()
        self.unaccounted: list[str] = []
        self.ignored: list[str] = []
        self._ignore = declared.ignore
        self._marks = {name: mark_of(value) for name, _, value in self._attributes()}
        self._passing = _passing_buffers(model)
        #: Snapshots hold them, too.
        self.saves_passing_buffers = False

    def note_stranger(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer that was not given has stepped."""
        self._strangers.add(optimizer)

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
        owners = optimizers_by_parameter(self._optimizers)
        moved = []
        for table in self._tables:
            is_given = any(table.optimizer is optimizer for optimizer in self._optimizers)
            if table.lookups is not None or not (is_given or table.optimizer is None):
                continue
            owner = owners.get(id(table.weight))
            # A table without owner was frozen: its state is still that of its last optimizer.
            if owner is not None and owner is not table.optimizer:
                table.optimizer = owner
                moved.append(table)
        return moved

    def _refuse_replaced_modules(self) -> None:
        """Raise UsageError if a module of a table has left the model."""
        modules = {id(module) for module in self._model.modules()}
        for table in self._tables:
            for module in table.modules:
                if id(module) in self._modules and id(module) not in modules:
                    raise UsageError(_REPLACED.format(name=table.name))

    def look(self) -> bool:
        """Look up what is unaccounted, and warn of what was not before; return whether all is."""
        self.unaccounted = []
        found = list(self._unaccounted())
        if any(each.values for each in found):
            saved = self._declared_leaves()
            found = [e for e in found if not (e.values and is_within(e.key, e.values, saved))]
        self.ignored = sorted({each.name for each in found if each.name in self._ignore})
        for name, what, remedy, *_ in found:
            if name in self._ignore:
                continue
            self.unaccounted.append(what)
            if what not in self._reported:
                self._reported.add(what)
                text = _NOT_SAVED.format(name=name, what=what, remedy=remedy)
                warnings.warn(text, UntrackedChangeWarning, stacklevel=4)
        return not self.unaccounted

    def _unaccounted(self) -> Iterator[_Unaccounted]:
        saved = {id(value) for value in self._model.state_dict(keep_vars=True).values()}
        saved |= {id(table.weight) for table in self._tables}
        yield from self._of_strangers(saved)
        yield from self._of_buffers()
        yield from self._of_attributes()
        for optimizer in self._optimizers:
            kind = type(optimizer).__name__
            if self._gradients.has(optimizer):
                yield _Unaccounted(
                    f"gradients of {kind}",
                    f"a gradient that waits for the step of a {kind}",
                    "call ckpt.step() only after optimizer.step(), or zero_grad() before it",
                )
            if not any(optimizer is item for item in self._stateful):
                yield from _of_optimizer(optimizer, saved)

    def _declared_leaves(self) -> dict[Any, set[str]]:
        extra = self._declared.extra_state
        return leaves([capture_stateful(self._stateful), None if extra is None else extra()])

    def _attributes(self) -> Iterator[tuple[str, str, Any]]:
        """Return names, kinds of owners, and values that no ``state_dict()`` shows."""
        for path, module in self._model.named_modules():
            for name, value in attributes_of(module):
                yield f"{path}.{name}" if path else name, type(module).__name__, value
        for index, optimizer in enumerate(self._optimizers):
            for name, value in attributes_of(optimizer):
                yield f"optimizers[{index}].{name}", type(optimizer).__name__, value

    def _of_attributes(self) -> Iterator[_Unaccounted]:
        for name, kind, value in self._attributes():
            if name not in self._marks and isinstance(value, bool):
                continue  # a flag that a trainer adds, such as Accelerate
            if not is_same_mark(self._marks.get(name), mark_of(value)):
                yield _Unaccounted(
                    f"attribute {name}",
                    f"the attribute '{name}' of a {kind}, which changes,",
                    "make it a buffer, or save it under its name with stateful= or extra_state=",
                    [value],
                    last_name(name),
                )

    def _of_buffers(self) -> Iterator[_Unaccounted]:
        now = _passing_buffers(self._model)
        of_rows = {id(key) for table in self._tables for key in table.key_arrays().values()}
        for name, (buffer, version) in self._passing.items():
            if id(buffer) in of_rows:
                continue
            if self.saves_passing_buffers and buffer.layout == torch.strided:
                continue
            if name in now and (now[name][0] is not buffer or now[name][1] != version):
                yield _Unaccounted(
                    f"buffer {name}",
                    f"the buffer '{name}', which has persistent=False and changes,",
                    "register it with persistent=True, or save it under its name with extra_state=",
                    [now[name][0]],
                    last_name(name),
                )

    def _of_strangers(self, saved: set[int]) -> Iterator[_Unaccounted]:
        own = {id(p) for o in self._optimizers for g in o.param_groups for p in g["params"]}
        fused = {id(table.weight) for table in self._tables if table.lookups is not None}
        for optimizer in list(self._strangers):
            if any(optimizer is item for item in self._stateful):
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
                    f"state of {kind}",
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


def _passing_buffers(model: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Return the buffers that no state_dict() has, with their versions."""
    return {
        f"{path}.{name}" if path else name: (buffer, buffer._version)
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
        if (buffer := module._buffers.get(name)) is not None
    }


def _of_optimizer(optimizer: torch.optim.Optimizer, saved: set[int]) -> Iterator[_Unaccounted]:
    kind = type(optimizer).__name__
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    known = {id(parameter) for parameter in parameters}
    keys: list[Any] = [key for key in optimizer.state if id(key) not in known]
    names = [key for key in keys if not isinstance(key, torch.Tensor)]
    if names and any(optimizer.state[key] for key in names):
        yield _Unaccounted(
            f"state of {kind} under {names[0]!r}",
            f"the state that a {kind} keeps under {names[0]!r}, which is no parameter,",
            "save it with extra_state=, and set it from report.extra_state after recover()",
            [optimizer.state[key] for key in names],
            str(names[0]),
        )
    others = [p for p in parameters if id(p) not in saved and p.requires_grad]
    if others:
        yield _Unaccounted(
            f"parameters of {kind} alone",
            f"a parameter of shape {tuple(others[0].shape)} that a {kind} updates and the model's "
            "state_dict() does not have",
            "give one module that holds all that is trained, such as a ModuleList of two models",
            others,
        )
