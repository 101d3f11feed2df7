"""Tables that one job cuts into parts, and another replicates as dense parameters.

TorchRec's planner may replicate a small table on every rank (data parallel) and, with another
number of ranks, cut it. The weight of table ``t`` is then the dense parameter ``t.weight``, and a
torch optimizer has its state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cpr_ext.recovery.import_store import part_of
from cpr_ext.recovery.restore import LiveModel
from cpr_ext.state.dense_schema import FUSED_STATE, OF_OPTIMIZERS
from cpr_ext.state.dense_state import DensePart, dense_values, generator_states
from cpr_ext.state.table import WEIGHT, Table, is_row_state, owners_by_parameter
from cpr_ext.state.wrapper_names import match_names

# The type of what a checkpoint of another kind says of optimizers: state by name, and no more.
IMPORTED = "Imported"
# The state that these optimizers make at their first step, of the weight's shape: zeros.
MADE_LATE: dict[type, tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
}


def state_of(optimizers: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the stored state of the parameter of a name; none if there is none."""
    for optimizer in optimizers:
        for index, known in enumerate(_names(optimizer)):
            if known == name:
                state: dict[str, Any] = optimizer["states"][str(index)]
                return state
    return {}


def _names(optimizer: Mapping[str, Any]) -> list[str]:
    return [name for group in optimizer.get("parameters", ()) for name in group]


def aligned(
    stored: Sequence[dict[str, Any]],
    live: Sequence[torch.optim.Optimizer],
    gone: Collection[str],
    changed: Mapping[int, dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return stored optimizers as ``live`` would be stored; as they are, if they are others.

    Optimizers and groups that have replicated tables alone are in one of the two jobs only.

    Args:
        gone: parameters of the stores that the live model holds otherwise.
        changed: the state that is not by row of live parameters that the stores hold otherwise.
    """
    left = [_without(optimizer, gone) for optimizer in stored]
    rest = iter([optimizer for optimizer in left if optimizer is not None])
    result = []
    for optimizer in live:
        mine = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        kept = [[key for key in group if key not in changed] for group in mine]
        is_new = all(group and not left for group, left in zip(mine, kept, strict=True))
        source = None if is_new else next(rest, None)
        if not is_new and not _fits(source, optimizer, mine, kept):
            return list(stored)
        result.append(_laid_out(source, optimizer, mine, changed))
    return list(stored) if next(rest, None) is not None else result


def _without(optimizer: dict[str, Any], gone: Collection[str]) -> dict[str, Any] | None:
    """Return a stored optimizer without these parameters; None if it had no others."""
    names = optimizer.get("parameters", [])
    if not any(name in gone for name in _names(optimizer)):
        return optimizer
    states, groups, kept_names, kept_states = iter(optimizer["states"].values()), [], [], []
    for group, of_group in zip(optimizer["groups"], names, strict=True):
        pairs = [(name, next(states)) for name in of_group]
        left = [(name, state) for name, state in pairs if name not in gone]
        if left or not pairs:
            groups.append(group)
            kept_names.append([name for name, _ in left])
            kept_states += [state for _, state in left]
    if not groups:
        return None
    numbered = {str(index): state for index, state in enumerate(kept_states)}
    return {**optimizer, "groups": groups, "parameters": kept_names, "states": numbered}


def _fits(
    source: Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer,
    mine: Sequence[Sequence[int]],
    kept: Sequence[Sequence[int]],
) -> bool:
    if source is None or source["type"] != type(optimizer).__name__:
        return False
    sizes = [len(left) for left, group in zip(kept, mine, strict=True) if left or not group]
    return [len(group) for group in source.get("parameters", ())] == sizes


def _laid_out(
    source: Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer,
    mine: Sequence[Sequence[int]],
    changed: Mapping[int, dict[str, Any]],
) -> dict[str, Any]:
    old_groups: Iterator[Any] = iter(source["groups"] if source is not None else ())
    old_states = iter(source["states"].values() if source is not None else ())
    groups, states = [], []
    for group, keys in zip(optimizer.param_groups, mine, strict=True):
        is_new = bool(keys) and all(key in changed for key in keys)
        own = {name: value for name, value in group.items() if name != "params"}
        groups.append(own if is_new else next(old_groups))
        states += [changed[k] if k in changed else next(old_states) for k in keys]
    return {
        "type": type(optimizer).__name__,
        "groups": groups,
        "states": {str(index): state for index, state in enumerate(states)},
        "parameters": [["" for _ in keys] for keys in mine],
    }


def take_imported(
    tree: dict[str, Any],
    live: Sequence[torch.optim.Optimizer],
    dense: Mapping[str, Any],
    changed: Mapping[int, dict[str, Any]],
) -> list[str]:
    """Lay out optimizer state that is known by name as ``live`` would be stored.

    Settings, generators and what fused optimizers know stay as they are, but for the steps.

    Returns:
        The parameters whose optimizer has state that is not there, one sentence each.
    """
    (imported,) = tree["optimizers"]
    names = {id(value): name for name, value in dense.items()}
    lacking, laid_out = [], []
    for optimizer in live:
        states: list[dict[str, Any]] = []
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            name = names.get(id(parameter), "")
            known = changed.get(id(parameter), state_of([imported], name))
            states.append(dict(known))
            needs_state = type(optimizer) in MADE_LATE or optimizer.state.get(parameter)
            if name and needs_state and not known:
                lacking.append(f"the optimizer's state of '{name}' is not in the checkpoint")
        settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        laid_out.append(
            {
                "type": type(optimizer).__name__,
                "groups": settings,
                "states": {str(index): state for index, state in enumerate(states)},
            }
        )
    own = {n: v for n, v in dense.items() if n.startswith(OF_OPTIMIZERS)}
    if FUSED_STATE in own:
        own[FUSED_STATE] = {**own[FUSED_STATE], "iterations": tree["extra"]["step"]}
    tree["model"] |= own
    tree["optimizers"], tree["rng"] = laid_out, generator_states()
    return lacking


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
    owners = owners_by_parameter(live.optimizers)
    fused = tree["model"].get(FUSED_STATE, {}).get("iterations")
    found = []
    for old, new in sorted(to_dense.items()):
        keys = _keys_of(tree, stored, [old])
        states = [state_of(tree["optimizers"], key) for key in keys]
        steps = next((int(state["step"]) for state in states if "step" in state), fused)
        weight = dense[new]
        if weight.dim() == 2:
            name = new.removesuffix(f".{WEIGHT}")
            optimizer = owners[id(weight)][0] if id(weight) in owners else None
            found.append(ReplicatedTable(name, weight, optimizer, steps))
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
