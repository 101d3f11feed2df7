"""Tables that one job cuts into parts, and another replicates as dense parameters.

TorchRec's planner may replicate a small table on every rank (data parallel) and, with another
number of ranks, cut it. The weight of table ``t`` is then the dense parameter ``t.weight``, and a
torch optimizer has its state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cpr_ext.recovery.optimizer_layout import (
    IMPORTED,
    MADE_LATE,
    aligned,
    state_of,
    take_imported,
)
from cpr_ext.recovery.part_copy import part_of
from cpr_ext.recovery.restore import LiveModel
from cpr_ext.state.dense_schema import FUSED_STATE
from cpr_ext.state.dense_state import DensePart, dense_values
from cpr_ext.state.table import WEIGHT, Table, is_row_state, optimizers_by_parameter
from cpr_ext.state.wrapper_names import match_names

# TorchRec's name of the first state of a table.
_FIRST_STATE = "momentum1"


class ReplicatedTable(Table):
    """A dense parameter of a live model that other stores hold as a table.

    Its optimizer's state is made at once, as the optimizer does at its first step.

    Args:
        steps: of the state in the stores; None: not known.
    """

    def __init__(
        self, name: str, weight: torch.Tensor, optimizer: Any, steps: int | None = None
    ) -> None:
        super().__init__(name, weight, optimizer)
        self.steps = steps
        if optimizer is not None and not optimizer.state.get(weight):
            made = {n: torch.zeros_like(weight) for n in MADE_LATE.get(type(optimizer), ())}
            if made:
                optimizer.state[weight] = {"step": torch.tensor(0.0), **made}

    @property
    def counts_steps(self) -> bool:
        """Whether what its optimizer does next depends on the number of steps."""
        return type(self.optimizer) in MADE_LATE

    def row_states(self) -> dict[str, torch.Tensor]:
        """See :meth:`Table.row_states`; state of one value per row has the shape (rows,)."""
        return {name: _by_row(value, self.weight) for name, value in super().row_states().items()}

    def can_make_row_state(self) -> bool:
        """Return False: all that there can be is made."""
        return False

    def other_state(self) -> dict[str, Any]:
        """Return its optimizer's state that is not per row, at the steps of the stores."""
        state = {} if self.optimizer is None else self.optimizer.state.get(self.weight, {})
        found = {n: v for n, v in state.items() if not is_row_state(v, self.num_embeddings)}
        if self.steps is not None and isinstance(found.get("step"), torch.Tensor):
            found["step"] = torch.full_like(found["step"], self.steps)
        return found


@dataclass(frozen=True)
class Regrouped:
    """The dense part of other stores, with the tables that a live model keeps otherwise.

    Attributes:
        part: as the live model would have captured it; of ``replicated`` it lacks the rows.
        replicated: dense parameters of the live model that the stores hold as tables.
        in_dense: whole arrays that the stores have in their dense part, by live table and name.
        differences: one sentence each.
    """

    part: DensePart
    replicated: Sequence[ReplicatedTable] = ()
    in_dense: Mapping[str, Mapping[str, torch.Tensor]] | None = None
    differences: Sequence[str] = ()


def regroup(part: DensePart, stored: Mapping[str, str], live: LiveModel) -> Regrouped:
    """Find the tables that either the stores or the live model replicate.

    Args:
        part: with the names of the live model.
        stored: the whole table of each table that the stores hold.
    """
    tree, tables = part.tree(), list(live.tables.values())
    dense = dense_values(live.model, tables)
    names = {part_of(table).table for table in tables}
    # Of a job's model: the tables of which other processes hold all rows, too.
    names |= getattr(live.model, "sharded_tables", frozenset())
    wholes = {f"{name}.{WEIGHT}" for name in stored.values()}
    to_dense = match_names(wholes, dense.keys() - tree["model"])
    to_rows = match_names(tree["model"].keys() - dense.keys(), {f"{n}.{WEIGHT}" for n in names})
    is_imported = [optimizer["type"] for optimizer in tree["optimizers"]] == [IMPORTED]
    if not to_dense and not to_rows and not is_imported:
        return Regrouped(part)
    replicated = _replicated(tree, stored, to_dense, dense, live)
    in_dense, changed = {}, {id(table.weight): table.other_state() for table in replicated}
    for old, new in to_rows.items():
        weight, state = tree["model"].pop(old), state_of(tree["optimizers"], old)
        rows = {n: _by_row(v, weight) for n, v in state.items() if is_row_state(v, len(weight))}
        if _FIRST_STATE in rows and (first := _first_state(tables, new)):
            rows[first] = rows.pop(_FIRST_STATE)
        in_dense[new.removesuffix(f".{WEIGHT}")] = {WEIGHT: weight, **rows}
        other = {name: v for name, v in state.items() if not is_row_state(v, len(weight))}
        changed |= {id(t.weight): other for t in tables if f"{part_of(t).table}.{WEIGHT}" == new}
    gone = {*to_rows, *_keys_of(tree, stored, to_dense)}
    differences: list[str] = []
    if is_imported:
        differences += take_imported(tree, live.optimizers, dense, changed)
    else:
        tree["optimizers"] = aligned(tree["optimizers"], live.optimizers, gone, changed)
    differences += [
        f"table '{table.name}': the stores do not show how many steps its optimizer has done"
        for table in replicated
        if table.counts_steps and table.steps is None
    ]
    return Regrouped(DensePart.of_tree(tree), replicated, in_dense, differences)


def _first_state(tables: Sequence[Table], weight: str) -> str | None:
    """Return the first state of a live table, in its optimizer's order."""
    parts = [table for table in tables if f"{part_of(table).table}.{WEIGHT}" == weight]
    return next((name for table in parts for name in table.row_states()), None)


def _replicated(
    tree: Mapping[str, Any],
    stored: Mapping[str, str],
    to_dense: Mapping[str, str],
    dense: Mapping[str, Any],
    live: LiveModel,
) -> list[ReplicatedTable]:
    """Return the live dense parameters that the stores hold as tables.

    Args:
        to_dense: their names, by the names of these tables' weights.
    """
    owners = optimizers_by_parameter(live.optimizers)
    fused = tree["model"].get(FUSED_STATE, {}).get("iterations")
    found = []
    for old, new in sorted(to_dense.items()):
        keys = _keys_of(tree, stored, [old])
        states = [state_of(tree["optimizers"], key) for key in keys]
        steps = next((int(state["step"]) for state in states if "step" in state), fused)
        weight = dense[new]
        if weight.dim() == 2:
            name = new.removesuffix(f".{WEIGHT}")
            found.append(ReplicatedTable(name, weight, owners.get(id(weight)), steps))
    return found


def _keys_of(
    tree: Mapping[str, Any], stored: Mapping[str, str], weights: Collection[str]
) -> list[str]:
    """Return the state_dict names of the parts of whole tables in the process of a dense part."""
    return [
        key
        for key, table in tree["table_keys"].items()
        if f"{stored.get(table, table)}.{WEIGHT}" in weights
    ]


def _by_row(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return state (rows, 1) as (rows,), a view: fused optimizers have it so."""
    is_column = value.dim() == 2 and value.shape[1] == 1 != weight.shape[1]
    return value[:, 0] if is_column else value
